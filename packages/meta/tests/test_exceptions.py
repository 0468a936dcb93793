"""The errors: one base, values as attributes, and pickles (worker processes send them home)."""

from __future__ import annotations

import pickle

import pytest

from stepwell_meta import exceptions
from stepwell_meta.exceptions import (
    DecodeError,
    MetadataError,
    MetadataWarning,
    PipeliningMetadataError,
    StepwellError,
    UnsupportedValueError,
)


@pytest.mark.parametrize("kind", [MetadataError, PipeliningMetadataError, UnsupportedValueError, DecodeError])
def test_every_error_has_the_layers_base(kind: type[Exception]) -> None:
    assert issubclass(kind, MetadataError)
    assert issubclass(kind, StepwellError)


def test_the_peers_errors_are_not_the_callers() -> None:
    assert not issubclass(DecodeError, PipeliningMetadataError | UnsupportedValueError)
    assert issubclass(MetadataWarning, UserWarning)


@pytest.mark.parametrize(
    ("error", "values"),
    [
        (PipeliningMetadataError("stage 2: no", stage=2, differences=()), {"stage": 2, "differences": ()}),
        (PipeliningMetadataError("no"), {"stage": None, "differences": ()}),
        (UnsupportedValueError("no", type_name="set", path="outputs[0]"), {"type_name": "set", "path": "outputs[0]"}),
        (DecodeError("no", offset=7), {"offset": 7}),
    ],
)
def test_values_are_attributes_and_survive_pickling(error: Exception, values: dict[str, object]) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert type(one) is type(error)
        assert str(one) == str(error)
        assert {name: getattr(one, name) for name in values} == values


class LayerError(StepwellError):
    """As a layer above may define one."""

    def __init__(self, rank: int, /, *, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.__cause__ = KeyError(reason)


def test_errors_of_other_layers_survive_pickling_too() -> None:
    error = pickle.loads(pickle.dumps(LayerError(3, reason="lost")))
    assert (type(error), str(error), error.rank) == (LayerError, "rank 3: lost", 3)


def test_every_class_is_public() -> None:
    defined = {
        name
        for name, value in vars(exceptions).items()
        if isinstance(value, type) and value.__module__ == exceptions.__name__
    }
    assert defined == set(exceptions.__all__)
