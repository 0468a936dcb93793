from __future__ import annotations

import pytest

from stepwell_mesh import exceptions
from stepwell_meta.exceptions import StepwellError


@pytest.mark.parametrize("name", [name for name in exceptions.__all__ if name != "TopologyWarning"])
def test_every_error_is_stepwells_and_this_layers(name) -> None:
    error = getattr(exceptions, name)
    assert issubclass(error, StepwellError)
    assert issubclass(error, exceptions.MeshError)


def test_wrong_arguments_and_broken_peers_are_told_apart() -> None:
    wrong = {"ModeError", "DegreesError", "AxisError", "ExternalMeshError", "DeviceTypeError"}
    for name in wrong:
        assert issubclass(getattr(exceptions, name), exceptions.TopologyError)
        assert issubclass(getattr(exceptions, name), ValueError)
    assert issubclass(exceptions.MeshLookupError, LookupError)
    for other in (exceptions.MeshBuildError, exceptions.MeshLookupError):
        assert not issubclass(other, exceptions.TopologyError)
    assert issubclass(exceptions.TopologyWarning, UserWarning)
