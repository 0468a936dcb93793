"""The live model: its parameters become this rank's shards, in place, and gradients arrive on them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stepwell_mesh import DataParallelTopology
from stepwell_meta import overlaps

from . import _compat as compat
from ._graph import Buffer
from ._table import Layout, Parameter, ParameterTable, names_by_tensor
from .exceptions import GradientError, ModelStateError


class LiveModel:
    """A model whose parameters are laid out as planned. Mutable: it is the link to a module that trains.

    Args:
        model: the module.
        table: its parameters before anything was sharded.
        layouts: how each shall lie on the ranks.
        topology: the axes; None with one rank.
        device: where shards live.

    Raises:
        ModelStateError: a parameter is sharded over an axis of data parallelism already.
    """

    def __init__(
        self,
        model: nn.Module,
        table: ParameterTable,
        layouts: Mapping[str, Layout],
        topology: DataParallelTopology | None,
        device: torch.device,
    ) -> None:
        _refuse_sharded(table, topology)
        if topology is not None and topology.mode != "ddp":
            _refuse_overlaps(model, table)
        self.model = model
        self.table = table.contiguous() if topology is not None and topology.mode != "ddp" else table
        self.layouts = layouts
        self.topology = topology
        self.device = device
        self.modules = tuple(model.modules())
        self._tree = [(m, tuple(m._modules.values()), frozenset(m._parameters)) for m in self.modules]
        self._places = {parameter.name: [_place(model, name) for name in parameter.names] for parameter in table}
        self.is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        self._lists: list[list[torch.Tensor]] = []  # of optimizers that were made before
        self._shard_rank = 0
        if topology is not None and topology.shard_axis is not None:
            self._shard_rank = topology.mesh.get_local_rank(topology.shard_axis)

    @property
    def distributed(self) -> bool:
        """Whether parameters are DTensors on the data-parallel axes (ddp leaves them as they are)."""
        return self.topology is not None and self.topology.mode != "ddp"

    def parameter(self, name: str) -> torch.Tensor:
        """The live parameter of a canonical name."""
        module, attribute = self._places[name][0]
        found = module._parameters.get(attribute)
        if found is None:
            raise ModelStateError(f"parameter {name} was removed from the model after compilation")
        return found

    def rows(self, parameter: Parameter) -> slice:
        """The rows of a sharded parameter that this rank holds."""
        rows = self.layouts[parameter.name].rows
        start = sum(rows[: self._shard_rank])
        return slice(start, start + rows[self._shard_rank])

    def check_fresh(self) -> None:
        """Refuse a model that has been trained on already.

        Raises:
            ModelStateError: a parameter has a gradient, or an optimizer has stepped on it.
        """
        old = [(parameter.name, self.parameter(parameter.name)) for parameter in self.table]
        if leftover := [name for name, tensor in old if tensor.grad is not None]:
            raise ModelStateError(
                f"parameters have gradients from before compilation ({', '.join(leftover[:3])}); they are not reduced, so"
                " step or zero them first"
            )
        self._lists = _optimizers_of(tensor for _, tensor in old)

    def check_unchanged(self) -> None:
        """Refuse a model to which modules or parameters were added, or whose modules were replaced or removed.

        Raises:
            ModelStateError: such a model.
        """
        for module, children, names in self._tree:
            if tuple(module._modules.values()) != children or not module._parameters.keys() <= names:
                where = next((name for name, known in self.model.named_modules() if known is module), "")
                raise ModelStateError(
                    f"{where or 'the model'} ({type(module).__name__}) has other modules or parameters than when it was compiled:"
                    f" a compiler keeps to those; change the model first, then make a compiler for it"
                )

    def commit(self) -> Callable[[], None]:
        """Put shards in place of the parameters, right after :meth:`check_fresh`, and give what is on the meta device memory.

        Returns what undoes that.
        """
        old = {parameter.name: self.parameter(parameter.name) for parameter in self.table}
        with torch.no_grad():
            if not self.is_meta:
                self._broadcast(old)
            new = {p.name: self._laid_out(p, old[p.name]) for p in self.table}
        contents: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (held, dict(held)) for module in self.modules for held in (module._parameters, module._buffers)
        ]
        lists = [(parameters, list(parameters)) for parameters in self._lists]
        self._lists = []

        def undo() -> None:
            for held, before in contents:
                held.update(before)
            for parameters, earlier in lists:
                parameters[:] = earlier

        by_id = {id(old[name]): new[name] for name in old}
        for parameters, earlier in lists:
            parameters[:] = [by_id.get(id(p), p) for p in earlier]
        if self.is_meta:
            _materialize_buffers(self.model, self.device)
        elif any(buffer.device != self.device for buffer in self.model.buffers()):
            _move_buffers(self.model, self.device)
        for parameter in self.table:
            for module, attribute in self._places[parameter.name]:
                module._parameters[attribute] = new[parameter.name]
        return undo

    def check_move(self, device: torch.device) -> None:
        """Refuse to take shards away from where their ranks communicate.

        Raises:
            ModelStateError: the mesh has other devices.
        """
        if self.topology is not None and self.distributed and device.type != self.topology.mesh.device_type:
            home = self.topology.mesh.device_type
            raise ModelStateError(
                f"the parameters are shards on a mesh of {home} ranks, which cannot go to {device.type}: give the compiler"
                f" device='{device}' when it is made"
            )

    def move(self, device: torch.device) -> None:
        """Move shards, their gradients and buffers to another device; parameters stay the same objects, as optimizers need."""
        self.device = device
        _move_buffers(self.model, device)
        self.model.to(device)

    def values(self) -> list[torch.Tensor]:
        """What the graph's parameter inputs get: this rank's part, filled up with zeros where the layout is uneven."""
        values = []
        for parameter in self.table:
            tensor = self.parameter(parameter.name)
            if any(module._parameters.get(name) is not tensor for module, name in self._places[parameter.name][1:]):
                raise ModelStateError(
                    f"parameter {parameter.name} is no longer one with {', '.join(parameter.aliases)}, to which it was tied when"
                    " the model was compiled"
                )
            local = compat.local_part(tensor) if isinstance(tensor, DTensor) else tensor.detach()
            layout = self.layouts[parameter.name]
            expected = parameter.shape
            if layout.sharded:
                rows = self.rows(parameter)
                expected = (rows.stop - rows.start, *parameter.shape[1:])
            if tuple(local.shape) != expected or local.dtype != parameter.dtype or local.device != self.device:
                raise ModelStateError(
                    f"parameter {parameter.name} is no longer what was compiled: expected {expected}, {parameter.dtype} on"
                    f" {self.device} on this rank, got {tuple(local.shape)}, {local.dtype} on {local.device}"
                )
            if layout.sharded and expected[0] < layout.padded_rows:
                local = F.pad(local, [*[0, 0] * (local.dim() - 1), 0, layout.padded_rows - expected[0]])
            elif parameter.stride is None:
                local = local.contiguous()
            values.append(local)
        return values

    def buffer_values(self, buffers: Sequence[Buffer]) -> list[torch.Tensor]:
        """What the graph's buffer inputs get.

        Raises:
            ModelStateError: one is not there, or looks otherwise than when the graph was captured.
        """
        values = []
        for buffer in buffers:
            module, attribute = _place(self.model, buffer.name)
            value = module._buffers.get(attribute)
            if value is None:
                raise ModelStateError(f"buffer {buffer.name} was removed from the model after compilation")
            if value.shape != buffer.shape or value.dtype != buffer.dtype:
                raise ModelStateError(
                    f"buffer {buffer.name} is no longer what was compiled: expected {tuple(buffer.shape)}, {buffer.dtype}, got"
                    f" {tuple(value.shape)}, {value.dtype}"
                )
            values.append(value)
        return values

    def trainable(self) -> dict[str, bool]:
        """Which parameters want gradients now."""
        return {parameter.name: self.parameter(parameter.name).requires_grad for parameter in self.table}

    def accumulate(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add gradients (of this rank's part, maybe padded) to ``.grad``; all are checked before any is added.

        Raises:
            GradientError: a name, shape or dtype does not fit.
        """
        ready = {}
        for name, gradient in gradients.items():
            parameter, tensor = self.table[name], self.parameter(name)
            layout = self.layouts[name]
            if layout.padded:
                rows = self.rows(parameter)
                gradient = gradient.narrow(0, 0, rows.stop - rows.start)
            local = compat.local_part(tensor) if isinstance(tensor, DTensor) else tensor
            if gradient.shape != local.shape or gradient.dtype != local.dtype:
                raise GradientError(
                    f"the gradient of {name} has shape {tuple(gradient.shape)} and {gradient.dtype}, its parameter here"
                    f" {tuple(local.shape)} and {local.dtype}"
                )
            ready[name] = gradient
        for name, gradient in _own_memory(ready).items():
            tensor = self.parameter(name)
            if isinstance(tensor, DTensor):
                gradient = compat.dtensor_like(gradient, tensor)
            if tensor.grad is None:
                tensor.grad = gradient
            else:
                tensor.grad.add_(gradient)

    def _laid_out(self, parameter: Parameter, old: torch.Tensor) -> nn.Parameter:
        local = (compat.local_part(old) if isinstance(old, DTensor) else old).detach()
        layout = self.layouts[parameter.name]
        if layout.sharded:
            local = local[self.rows(parameter)]
        if local.is_meta:
            local = _undefined(local, self.device)
        elif layout.sharded or self.distributed:
            local = local.to(self.device, copy=True, memory_format=torch.contiguous_format)
        else:
            local = local.to(self.device)
        if not self.distributed:
            if isinstance(old, DTensor):
                local = compat.dtensor_like(local, old)
            elif local.data_ptr() == old.data_ptr() and not old.is_meta and isinstance(old, nn.Parameter):
                return old
        else:
            local = self._as_dtensor(parameter, local)
        new = nn.Parameter(local, requires_grad=parameter.trainable)
        new.__dict__.update(old.__dict__)
        return new

    def _as_dtensor(self, parameter: Parameter, local: torch.Tensor) -> DTensor:
        topology = self.topology
        assert topology is not None
        layout, parallel = self.layouts[parameter.name], parameter.tensor_parallel
        placements: dict[str, Placement] = {}
        shape, stride = parameter.shape, _dense_stride(parameter.shape)
        if parallel is not None:
            names = parallel.mesh.mesh_dim_names or ()
            if missing := [name for name in names if name not in (topology.mesh.mesh_dim_names or ())]:
                raise ModelStateError(
                    f"parameter {parameter.name} is laid out over the axes {names}, and the mesh given to the compiler has no"
                    f" axis {missing[0]!r}; pass the mesh that holds both"
                )
            placements |= dict(zip(names, parallel.placements, strict=True))
            shape, stride = parallel.shape, parallel.stride
        every = [n for n in topology.mesh.mesh_dim_names or () if n in placements or n in topology.axis_names]
        if topology.replicate_axis is not None:
            placements[topology.replicate_axis] = Replicate()
        if topology.shard_axis is not None:
            placements[topology.shard_axis] = Replicate()
        if layout.sharded and topology.shard_axis is not None:
            inner = 1
            for name in every[every.index(topology.shard_axis) + 1 :]:
                if placements[name].is_shard(0):
                    inner *= topology.mesh[name].size()
            placements[topology.shard_axis] = Shard(0) if inner == 1 else compat.strided_shard(0, inner)
        mesh = topology.mesh[tuple(every)] if tuple(every) != topology.mesh.mesh_dim_names else topology.mesh
        return DTensor.from_local(
            local, mesh, [placements[name] for name in every], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Every rank starts from the values of the first rank of its data-parallel groups."""
        if self.topology is None:
            return
        everything = [*tensors.values(), *self.model.buffers()]
        for axis in self.topology.axis_names:
            group = self.topology.mesh.get_group(axis)
            source = dist.get_process_group_ranks(group)[0]
            for tensor in everything:
                local = compat.local_part(tensor) if isinstance(tensor, DTensor) else tensor.detach()
                for dim, stride in enumerate(local.stride()):
                    if stride == 0 and local.shape[dim]:  # expanded: one element, seen several times
                        local = local.narrow(dim, 0, 1)
                if local.numel():
                    dense = local.resolve_conj().contiguous()
                    # As bytes: a backend may not know the dtype, and values are only copied.
                    dist.broadcast(dense.view(-1).view(torch.uint8), source, group=group)
                    if dense.data_ptr() != local.data_ptr():
                        local.copy_(dense)


def _refuse_sharded(table: ParameterTable, topology: DataParallelTopology | None) -> None:
    for parameter in table:
        if topology is None or parameter.tensor_parallel is None:
            continue
        axes = parameter.tensor_parallel.mesh.mesh_dim_names or ("an axis without a name",)
        if taken := [
            axis for axis in axes if axis in topology.axis_names or axis not in (topology.mesh.mesh_dim_names or ())
        ]:
            raise ModelStateError(
                f"parameter {parameter.name} is laid out over {taken[0]!r} already, by another compiler or by fully_shard; step"
                " with that one, or compile a model whose parameters are whole (or parallel over other axes of the mesh)"
            )


def _refuse_overlaps(model: nn.Module, table: ParameterTable) -> None:
    """Shards lie apart: what was written through one name would no longer be read through the other."""
    parameters = [(parameter.name, model.get_parameter(parameter.name)) for parameter in table]
    buffers = names_by_tensor(list(model.named_buffers(remove_duplicate=False)))
    everything = [*parameters, *((names[0], buffer) for buffer, names in buffers)]
    for number, other in overlaps(tensor for _, tensor in everything).items():
        (first, one), (second, two) = everything[number], everything[other]
        if one.requires_grad or two.requires_grad:
            raise ModelStateError(
                f"{first} and {second} are two tensors in the same memory: as shards they would lie apart, and no longer"
                " change together; use one and the same Parameter under both names, or give each its own memory (clone())"
            )


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, attribute = name.rpartition(".")
    return model.get_submodule(module), attribute


def _dense_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _own_memory(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same gradients, none of which overlaps another; parts of one bucket lie beside each other and stay where they are."""
    own = {name: gradient.contiguous() for name, gradient in gradients.items()}
    taken = 0  # up to which address memory is taken by those before
    for name, gradient in sorted(own.items(), key=lambda item: item[1].data_ptr()):
        if gradient.data_ptr() < taken:
            own[name] = gradient.clone()
        else:
            taken = gradient.data_ptr() + gradient.nbytes
    return own


def _undefined(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a meta tensor; not-a-number until somebody initialises it, so that forgetting it is seen at once."""
    value = float("nan") if meta.is_floating_point() or meta.is_complex() else 0
    return torch.full_like(meta, value, device=device, memory_format=torch.contiguous_format)


def _materialize_buffers(model: nn.Module, device: torch.device) -> None:
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = _undefined(buffer, device)
                module._buffers[name] = made[id(buffer)]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]


def _optimizers_of(parameters: Any) -> list[list[torch.Tensor]]:
    """The ``params`` lists of optimizers that were built on these parameters before they became shards.

    Raises:
        ModelStateError: such an optimizer has state for them already.
    """
    wanted = {id(p): p for p in parameters}

    # Upwards from the parameters, not through gc.get_objects(): that takes hold of every tuple which another thread is just
    # making, and Python then fails there.
    def holders(things: list[Any], kind: type) -> list[Any]:  # each look takes in all objects of the process
        return [one for one in gc.get_referrers(*things) if issubclass(type(one), kind)] if things else []

    groups = [thing for thing in holders(holders(list(wanted.values()), list), dict) if "params" in thing]
    lists = holders(groups, list)
    owners = holders(lists, object)
    owners += holders([thing for thing in owners if type(thing) is dict], object)  # an object's attributes
    found = []
    for thing in {id(thing): thing for thing in owners}.values():
        if not issubclass(type(thing), torch.optim.Optimizer):  # not isinstance: some proxies warn when asked
            continue
        lists = [group["params"] for group in thing.param_groups if any(id(p) in wanted for p in group["params"])]
        if any(id(p) in wanted for p in thing.state):
            raise ModelStateError(
                f"a {type(thing).__name__} has already stepped on the parameters; compile before the first step"
            )
        found += lists
    return found
