"""The passes, one file each."""

from __future__ import annotations

from ._bucket import BucketPass
from ._data_parallel import DataParallelPass
from ._dead import DeadCollectivePass
from ._default import default_passes
from ._overlap import CostModel, OverlapPass, RooflineCosts
from ._remat import RematPass
from ._reshard import ReshardPass
from ._split import Crossing, Piece, SplitGraph, SplitPass, pieces

__all__ = [
    "BucketPass",
    "CostModel",
    "Crossing",
    "DataParallelPass",
    "DeadCollectivePass",
    "OverlapPass",
    "Piece",
    "RematPass",
    "ReshardPass",
    "RooflineCosts",
    "SplitGraph",
    "SplitPass",
    "default_passes",
    "pieces",
]
