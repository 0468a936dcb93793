"""Which passes a configuration asks for, in which order."""

from __future__ import annotations

from .._config import PassConfig
from .._pass import GraphPass
from ._bucket import BucketPass
from ._data_parallel import DataParallelPass
from ._dead import DeadCollectivePass
from ._overlap import OverlapPass
from ._remat import RematPass
from ._reshard import ReshardPass


def default_passes(config: PassConfig) -> tuple[GraphPass, ...]:
    """The passes for a configuration, in an order that their contracts allow.

    Raises:
        ConfigError: the configuration asks for torch's own passes, and the installed torch has not what they need.
    """
    passes: list[GraphPass] = [DataParallelPass(), DeadCollectivePass(), RematPass()]
    if config.reshard_after_forward is not False:
        passes.append(ReshardPass())
    if config.bucket_by != "none":
        passes.append(BucketPass(backend=config.pass_backend))
    return (*passes, OverlapPass(backend=config.pass_backend))
