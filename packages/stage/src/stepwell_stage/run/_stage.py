"""One stage of a pipeline: a piece of the model with its place and what was declared of its values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stepwell_mesh import GetMesh, MeshCache, adapt_torch_get_mesh
from stepwell_meta import (
    AnyMeta,
    InferenceMode,
    StageMeta,
    extract_meta,
    extract_metas,
    forget_meshes,
    needs_dynamic,
    normalize_outputs,
    validate_static_arg_grad_correspondence,
)
from stepwell_p2p import C10dTransport, Transport, Wire

from .._compat import tree_flatten
from ..exceptions import StageUsageError
from ..plan._count import whole
from ._agree import LooksAtBatch
from ._looks import forward_meta
from ._program import EagerProgram, StageProgram
from ._torch_stage import TorchStage

if TYPE_CHECKING:
    from ._tie import TiedGroup


class PipelineStage(TorchStage):
    """A piece of the model that is stage ``stage_index`` of ``num_stages``.

    Mutable in what it holds, the module, and in what a schedule of torch makes of it. How many microbatches it runs, in which
    order, and what it exchanges with whom is the :class:`Executor`'s matter, or that of a schedule of
    ``torch.distributed.pipelining``, whose stages' methods it has too.

    Example::

        stage = PipelineStage(layers, 0, num_stages=4, device="cpu")

    Args:
        submodule: the module, or any :class:`StageProgram`. It gets the previous stage's outputs as positional arguments (the
            first stage: the caller's). A module is moved to the device, unless it has parameters on the meta device.
        stage_index: its number, from 0 along the data flow.
        num_stages: how many stages the pipeline has.
        device: where it computes.
        input_args: example of one microbatch's inputs: a tensor or a tuple of tensors.
        output_args: likewise of its outputs, in their structure; outputs that depend on parameters or on inputs that require grad
            require grad here too. If every stage declares inputs and outputs, nothing about values is exchanged before or
            during the first step; otherwise all learn from the first microbatch.
        output_grads: examples of the outputs' gradients; needed besides ``output_args`` where outputs are DTensors, whose
            gradients may be placed otherwise than themselves.
        input_grads: likewise of the inputs' gradients.
        group: a process group of torch.distributed whose ranks are the pipeline's; shorthand for
            ``transport=C10dTransport(group)``.
        dw_builder: for a module whose backward leaves its weights' gradients for later: called after each backward, it returns
            the function that computes them, which a whole backward calls at once and a split one in its second part.
        get_mesh: finds the mesh for a :class:`stepwell_meta.MeshKey`, where DTensors come from other stages; a function of axis
            names and layout, as torch's stages take, is one too. Meshes of the
            module's own DTensor parameters and of the examples are known without it.
        transport: what carries values to other ranks. All stages of a rank use one.
        wires: which output goes into which input of which later stage; the same for every stage of the pipeline. By default all
            outputs of a stage are the inputs of the next.
        shapes: "static": inputs of one shape give outputs of one shape, which is learned once; "dynamic": the shape of an output
            may depend on the data, so each message says its own. The same for every stage.
        classes: dataclasses, attrs classes, named tuples and enums among the previous stage's outputs that cannot be found by
            name in a module that is imported here, such as those defined in a function.
        names: where the module's parts are in the whole model, for :func:`state_dict`: from the name of a submodule, parameter
            or buffer to the original one (``{"0": "layers.4"}``); the module itself is ``""``. What is not named keeps its name.

    Attributes:
        tied: tensors of this stage that other stages hold too, by name; see :func:`tie`.
        to_tie: names of what is still to be tied, before a step can run.
        parts: which cut of the model it is of; the same on all stages.
        needs_process: why its rank must be a process of its own; "" where it may be a thread.
        alike: looks at what this rank is given for a step, where every rank is given the same; the same on all stages of a rank.

    Raises:
        StageUsageError: the index does not fit the number of stages, the submodule is neither module nor program, both group
            and transport are given, or an option has no such value.
        PipeliningMetadataError: examples and their gradients do not go together.
    """

    def __init__(
        self,
        submodule: nn.Module | StageProgram,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Any = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: GetMesh | Callable[[tuple[str, ...], Any], DeviceMesh | None] | None = None,
        *,
        transport: Transport | None = None,
        wires: Iterable[Wire] | None = None,
        shapes: Literal["static", "dynamic"] = "static",
        classes: Iterable[type] = (),
        names: Mapping[str, str] | None = None,
    ) -> None:
        stage_index = whole(stage_index, "stage_index", StageUsageError)
        num_stages = whole(num_stages, "num_stages", StageUsageError)
        if not 0 <= stage_index < num_stages:
            raise StageUsageError(
                f"stage_index must be 0 to {num_stages - 1} for {num_stages} stages, got {stage_index}"
            )
        if group is not None and transport is not None:
            raise StageUsageError("give a stage a group or a transport, not both: a group becomes C10dTransport(group)")
        if group is not None and group is dist.GroupMember.NON_GROUP_MEMBER:
            raise StageUsageError(
                f"stage {stage_index}: this rank is not in the group; make the stages of a pipeline on its own ranks only"
            )
        if shapes not in ("static", "dynamic"):
            raise StageUsageError(f"shapes must be 'static' or 'dynamic', got {shapes!r}")
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group
        self.transport = C10dTransport(group) if group is not None else transport
        if self.transport is not None and self.transport.size > num_stages:
            raise StageUsageError(
                f"the pipeline's group has {self.transport.size} ranks for {num_stages} stages: give every rank a stage"
            )
        self.submodule = submodule
        self.names = dict(names or {})
        self.tied: dict[str, TiedGroup] = {}
        self.to_tie: tuple[str, ...] = ()
        self.parts = ""
        self.needs_process = ""
        self.alike: LooksAtBatch | None = None
        self.program: StageProgram
        if isinstance(submodule, nn.Module):
            if not any(parameter.is_meta for parameter in submodule.parameters()):
                submodule.to(self.device)
            self.program = EagerProgram(submodule, dw_builder=dw_builder)
        elif isinstance(submodule, StageProgram):
            if dw_builder is not None:
                raise StageUsageError("dw_builder is for modules; a StageProgram runs its own backward for weights")
            self.program = submodule
        else:
            raise StageUsageError(f"a stage runs an nn.Module or a StageProgram, got {type(submodule).__qualname__}")
        self.wires = None if wires is None else tuple(wires)
        self.shapes = shapes
        self.classes = tuple(classes)
        self.declared_outputs = None if output_args is None else forward_meta(output_args)
        self.declared = StageMeta(
            None if input_args is None else _metas(input_args),
            None if self.declared_outputs is None else self.declared_outputs.outputs,
            None if input_grads is None else _grad_metas(input_grads),
            None if output_grads is None else _grad_metas(output_grads),
        )
        kind: Literal["input", "output"]
        for kind, values, grads in (
            ("input", self.declared.inputs, self.declared.input_grads),
            ("output", self.declared.outputs, self.declared.output_grads),
        ):
            if values is not None and grads is not None:
                validate_static_arg_grad_correspondence(values, grads, kind=kind, stage=stage_index)
        if isinstance(submodule, nn.Module) and any(isinstance(one, DTensor) for one in submodule.parameters()):
            forget_meshes()  # its operators must not meet equal meshes whose groups were destroyed since
        self.meshes = MeshCache(_of_key(get_mesh))
        self.meshes.add_tensors(self._tensors_known((input_args, output_args, input_grads, output_grads)))

    @property
    def is_first(self) -> bool:
        """Whether the caller's arguments enter here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether its outputs are the model's."""
        return self.stage_index == self.num_stages - 1

    def vote(self, *, has_backward: bool) -> InferenceMode:
        """Whether what was declared is enough to run this stage, or its values must be learned from the first microbatch."""
        if self.shapes == "dynamic":
            return InferenceMode.DYNAMIC
        dynamic = needs_dynamic(self.declared, has_backward=has_backward)
        return InferenceMode.DYNAMIC if dynamic else InferenceMode.STATIC

    def _tensors_known(self, examples: tuple[Any, ...]) -> Iterator[torch.Tensor]:
        for example in examples:
            yield from (leaf for leaf in tree_flatten(example)[0] if isinstance(leaf, torch.Tensor))
        if isinstance(self.submodule, nn.Module):
            yield from self.submodule.parameters()

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage_index} of {self.num_stages}, {type(self.submodule).__name__}, {self.device})"


def _of_key(get_mesh: Callable[..., DeviceMesh | None] | None) -> GetMesh | None:
    """A function of a key, also from one that was written for torch's own stages."""
    if get_mesh is None:
        return None
    try:
        inspect.signature(get_mesh).bind(None)
    except TypeError:
        return adapt_torch_get_mesh(get_mesh)
    except ValueError:  # a callable that does not say what it takes
        pass
    return get_mesh


def _metas(example: Any) -> tuple[AnyMeta, ...]:
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    return tuple(extract_metas(normalize_outputs(args).leaves))


def _grad_metas(example: Any) -> tuple[AnyMeta | None, ...]:
    grads = example if isinstance(example, tuple | list) else (example,)
    return tuple(None if grad is None else extract_meta(grad) for grad in grads)
