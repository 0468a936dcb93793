"""What a tensor looks like, without the tensor."""

from __future__ import annotations

from ._compare import Difference, diff, validate, validate_static_arg_grad_correspondence
from ._compat import forget_meshes
from ._dtensor import DTensorMeta, mesh_key
from ._extract import derive_grad_metas, extract_meta, extract_metas, to_local_if_dtensor
from ._inference import InferenceMode, needs_dynamic
from ._mesh_key import MeshKey
from ._overlaps import overlaps
from ._stage import AnyMeta, BackwardMeta, ForwardMeta, StageMeta
from ._tensor import TensorMeta
from ._tree import Outputs, Structure, normalize_outputs
from ._wire import MAX_ENCODED_BYTES, decode, encode
from .exceptions import (
    DecodeError,
    MetadataError,
    MetadataWarning,
    PipeliningMetadataError,
    StepwellError,
    UnsupportedValueError,
)

__all__ = [
    "MAX_ENCODED_BYTES",
    "AnyMeta",
    "BackwardMeta",
    "DTensorMeta",
    "DecodeError",
    "Difference",
    "ForwardMeta",
    "InferenceMode",
    "MeshKey",
    "MetadataError",
    "MetadataWarning",
    "Outputs",
    "PipeliningMetadataError",
    "StageMeta",
    "StepwellError",
    "Structure",
    "TensorMeta",
    "UnsupportedValueError",
    "decode",
    "derive_grad_metas",
    "diff",
    "encode",
    "extract_meta",
    "extract_metas",
    "forget_meshes",
    "mesh_key",
    "needs_dynamic",
    "normalize_outputs",
    "overlaps",
    "to_local_if_dtensor",
    "validate",
    "validate_static_arg_grad_correspondence",
]
