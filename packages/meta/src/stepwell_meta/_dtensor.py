"""What a DTensor looks like: its local shard, the whole, how one comes from the other, and on which mesh."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ._compat import StridedShard
from ._mesh_key import MeshKey
from ._tensor import TensorMeta, check_grad, check_layout, check_plain, to_ints, type_name
from .exceptions import MetadataError, UnsupportedValueError

__all__ = ["DTensorMeta", "mesh_key"]

_PLACEMENTS = frozenset({Shard, Replicate, Partial, StridedShard} - {None})

# A mesh never changes, and asking it for its ranks takes 0.1 ms: remember its key for as long as it lives.
_keys: weakref.WeakKeyDictionary[DeviceMesh, MeshKey] = weakref.WeakKeyDictionary()


def mesh_key(mesh: DeviceMesh) -> MeshKey:
    """The key of a mesh: its axis names and rank grid, relative to the first rank.

    Example:
        >>> mesh_key(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")))  # doctest: +SKIP
        MeshKey(axis_names=('dp', 'tp'), shape=(2, 4), stride=(4, 1), offsets=None)
    """
    key = _keys.get(mesh)
    if key is None:
        ranks = mesh.mesh
        key = MeshKey.from_ranks(ranks.flatten().tolist(), tuple(ranks.shape), axis_names=mesh.mesh_dim_names)
        _keys[mesh] = key
    return key


def _placements(values: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(values)


@attrs.frozen
class DTensorMeta:
    """What a DTensor looks like on this rank. Hashable, comparable; sizes and strides in elements.

    ``shape`` and ``stride`` are those of the local shard, as in `TensorMeta`. It is no subclass of `TensorMeta`, because a
    tensor made from it needs a mesh; `local` is the `TensorMeta` of the shard.

    Attributes:
        shape: Sizes of the local shard.
        stride: Strides of the local shard.
        dtype: Dtype of both.
        requires_grad: Whether the DTensor requires grad.
        global_shape: Sizes of the whole tensor.
        global_stride: Strides of the whole tensor.
        placements: One for each axis of the mesh: Shard, Replicate, Partial, or torch's strided shard.
        mesh_key: Which mesh, without the ranks.

    Raises:
        MetadataError: The fields contradict each other.
        UnsupportedValueError: A placement of another kind, such as the masked partial sum of a sharded embedding.
    """

    shape: tuple[int, ...] = attrs.field(converter=to_ints)
    stride: tuple[int, ...] = attrs.field(converter=to_ints)
    dtype: torch.dtype
    requires_grad: bool
    global_shape: tuple[int, ...] = attrs.field(converter=to_ints)
    global_stride: tuple[int, ...] = attrs.field(converter=to_ints)
    placements: tuple[Placement, ...] = attrs.field(converter=_placements)
    mesh_key: MeshKey

    def __attrs_post_init__(self) -> None:
        """Refuse what no DTensor can be."""
        check_grad(self.dtype, requires_grad=self.requires_grad)
        check_layout(self.shape, self.stride, self.dtype)
        check_layout(self.global_shape, self.global_stride, self.dtype)
        if len(self.shape) != len(self.global_shape):
            raise MetadataError(f"a local shard has as many dims as the whole, got {self.shape} of {self.global_shape}")
        if len(self.placements) != len(self.mesh_key.shape):
            raise MetadataError(f"expected one placement for each axis of mesh {self.mesh_key}, got {self.placements}")
        for placement in self.placements:
            self._check_placement(placement)

    def _check_placement(self, placement: Placement) -> None:
        if type(placement) not in _PLACEMENTS:
            raise UnsupportedValueError(
                "expected placements Shard, Replicate, Partial or strided shard, "
                f"got {type_name(placement)}: redistribute() the DTensor first",
                type_name=type_name(placement),
            )
        dim = getattr(placement, "dim", None)
        if dim is not None and not 0 <= dim < len(self.shape):
            raise MetadataError(f"{placement!r} does not fit a tensor of shape {self.global_shape}")

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> DTensorMeta:
        """Describe a DTensor.

        Raises:
            UnsupportedValueError: ``tensor`` is no DTensor, its local shard is no plain tensor, it has a
                placement that is bound to this rank, or this rank is not in its mesh.
        """
        if type(tensor) is not DTensor:
            raise UnsupportedValueError(
                f"expected a DTensor, got {type_name(tensor)}: use extract_meta for tensors of either kind",
                type_name=type_name(tensor),
            )
        if tensor.device_mesh.get_coordinate() is None:
            raise UnsupportedValueError(
                f"this rank holds no shard: it is not in {tensor.device_mesh}; use the DTensor on that mesh's ranks only",
                type_name=type_name(tensor),
            )
        with torch.no_grad():  # gives the shard itself, without a step in the autograd graph
            local = tensor.to_local()
        check_plain(local)
        return cls(
            shape=local.shape,
            stride=local.stride(),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            global_shape=tensor.shape,
            global_stride=tensor.stride(),
            placements=tensor.placements,
            mesh_key=mesh_key(tensor.device_mesh),
        )

    @property
    def local(self) -> TensorMeta:
        """The meta of the local shard as a plain tensor, which is what crosses a wire."""
        return TensorMeta(self.shape, self.stride, self.dtype, self.requires_grad)

    @property
    def whole(self) -> TensorMeta:
        """The meta that the whole tensor would have as a plain one."""
        return TensorMeta(self.global_shape, self.global_stride, self.dtype, self.requires_grad)

    @property
    def numel(self) -> int:
        """Number of elements of the local shard."""
        return self.local.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of the local shard."""
        return self.local.nbytes

    def without_grad(self) -> DTensorMeta:
        """The same meta with requires_grad False."""
        return attrs.evolve(self, requires_grad=False) if self.requires_grad else self

    def empty(self, device: torch.device | str, mesh: DeviceMesh) -> DTensor:
        """An uninitialised DTensor on ``mesh``, its shard on ``device`` as `TensorMeta.empty` makes it.

        No collective runs: what the other ranks hold is not checked.

        Raises:
            MetadataError: ``mesh`` has another key than the tensor that was described.
        """
        return self.from_local(self.local.without_grad().empty(device), mesh)

    def from_local(self, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """The DTensor of this meta whose shard is ``local``, without a collective check.

        Raises:
            MetadataError: ``mesh`` has another key, or ``local`` another shape or dtype, than was described.
        """
        if mesh_key(mesh) != self.mesh_key:
            raise MetadataError(f"expected a mesh {self.mesh_key}, got {mesh_key(mesh)}")
        if tuple(local.shape) != self.shape or local.dtype != self.dtype:
            raise MetadataError(
                f"expected a local {self.dtype} shard of shape {self.shape}, "
                f"got {local.dtype} of shape {tuple(local.shape)}"
            )
        whole = DTensor.from_local(
            local,
            mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.global_shape),
            stride=self.global_stride,
        )
        if self.requires_grad and whole.is_leaf:
            whole.requires_grad_()
        return whole

    def __str__(self) -> str:
        """Short form for messages."""
        return f"DTensor of shape {self.global_shape}, {self.placements} on mesh {self.mesh_key}, local {self.local}"
