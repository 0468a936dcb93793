"""One stage during steps: where its microbatches' values are, and the actions that move them.

Every method named like an action is that action for one microbatch. The executor binds them into a flat list once; a step then
only calls down the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from stepwell_meta import ForwardMeta, TensorMeta, encode, extract_metas, normalize_outputs, validate
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Edge, Handle, Op, OpKind, Placement, Send, Transport, send_values

from ..exceptions import StageUsageError
from ..plan._action import Kind
from ._inbox import Expected, Inbox
from ._stage import PipelineStage, forward_meta, plain


@attrs.define
class StepData:
    """What one call of step or eval brings and takes, for the stages of this rank. Mutable: results are filled in.

    Attributes:
        args: positional arguments of each microbatch, on the first stage's rank.
        kwargs: keyword arguments of each microbatch.
        targets: targets of each microbatch, on the last stage's rank; None where the loss takes none.
        weights: weight of each microbatch's loss.
        keep_outputs: whether the last stage keeps its outputs.
        losses: loss of each microbatch, by number.
        outputs: outputs of each microbatch, by number.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None
    weights: Sequence[float]
    keep_outputs: bool
    losses: dict[int, torch.Tensor] = attrs.field(factory=dict)
    outputs: dict[int, Any] = attrs.field(factory=dict)


@attrs.define
class Known:
    """What a stage knows of its values under one way of cutting the batch. Mutable: it is learned.

    Attributes:
        groups: for each microbatch its group; microbatches of one group share their metadata.
        inputs: what each group's inputs look like, once known.
        outputs: likewise of its outputs.
    """

    groups: Sequence[int]
    inputs: dict[int, ForwardMeta] = attrs.field(factory=dict)
    outputs: dict[int, ForwardMeta] = attrs.field(factory=dict)


class StageRun:
    """One stage under one schedule; mutable, used by one thread.

    Attributes:
        data: what the step under way brings and takes.
        previous: the stage before, where it is on this rank too.
        following: the stage after, where it is on this rank too.
    """

    def __init__(
        self,
        stage: PipelineStage,
        placement: Placement,
        transport: Transport,
        inboxes: Mapping[int, Inbox],
        loss_fn: Callable[..., torch.Tensor] | None,
        *,
        has_backward: bool,
    ) -> None:
        index, ranks = stage.stage_index, placement.ranks
        self.stage = stage
        self.index = index
        self.groups: Sequence[int] = ()
        self.inputs: dict[int, ForwardMeta] = {}
        self.outputs: dict[int, ForwardMeta] = {}
        self._headed_in: frozenset[int] = frozenset()
        self._headed_out: frozenset[int] = frozenset()
        self.program = stage.program
        self.has_backward = has_backward
        self.data = _NO_DATA
        self.previous: StageRun | None = None
        self.following: StageRun | None = None
        self._transport = transport
        self._loss_fn = loss_fn
        self._before = None if stage.is_first else inboxes.get(ranks[index - 1])
        self._after = None if stage.is_last else inboxes.get(ranks[index + 1])
        # Ops never change, so each is made once.
        here = ranks[index]
        before = here if stage.is_first else ranks[index - 1]
        after = here if stage.is_last else ranks[index + 1]
        self._recv_f = _ops(OpKind.RECV_F, Edge(before, here), index - 1)
        self._send_f = _ops(OpKind.SEND_F, Edge(here, after), index)
        self._recv_b = _ops(OpKind.RECV_B, Edge(after, here), index + 1)
        self._send_b = _ops(OpKind.SEND_B, Edge(here, before), index)
        self._weights: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}
        # Values of microbatches under way, by number. Each is taken out by its last user.
        self._in: dict[int, tuple[torch.Tensor, ...]] = {}
        self._out: dict[int, tuple[torch.Tensor, ...]] = {}
        self._grads_in: dict[int, tuple[torch.Tensor, ...]] = {}
        self._grads_out: dict[int, list[torch.Tensor]] = {}
        self._roots: dict[int, list[torch.Tensor]] = {}
        self._sent_f: dict[int, Handle] = {}
        self._sent_b: dict[int, Handle] = {}

    def know(self, known: Known, headed_in: frozenset[int], headed_out: frozenset[int]) -> None:
        """Take what is known of the step to come.

        Args:
            known: looks of inputs and outputs; completed as they are learned.
            headed_in: microbatches whose inputs come behind a header, since their look is not known yet.
            headed_out: likewise of their outputs.
        """
        self.groups, self.inputs, self.outputs = known.groups, known.inputs, known.outputs
        self._headed_in, self._headed_out = headed_in, headed_out

    def clear(self) -> None:
        """Let go of every value, at the end of a step or after a failure."""
        self.data = _NO_DATA
        for slots in (self._in, self._out, self._grads_in, self._grads_out, self._roots, self._sent_f, self._sent_b):
            slots.clear()

    # Forward.

    def recv_f(self, microbatch: int) -> None:
        """Post the receive of the inputs."""
        assert self._before is not None  # lowering posts receives only where another rank sends
        learn = functools.partial(self.inputs.__setitem__, self.groups[microbatch])
        self._before.expect(
            Expected(
                (True, self.index, microbatch),
                functools.partial(self._recv_f, microbatch),
                functools.partial(self._input_metas, microbatch),
                learn if microbatch in self._headed_in else None,
            )
        )

    def await_f(self, microbatch: int) -> None:
        """Wait for the inputs."""
        assert self._before is not None  # recv_f came first
        self._in[microbatch] = self._before.take((True, self.index, microbatch))

    def forward(self, microbatch: int) -> None:
        """Run the module, and on the last stage the loss."""
        received: tuple[torch.Tensor, ...] = ()
        if self.stage.is_first:
            args = self.data.args[microbatch]
            structure = None
        else:
            received = self._in.pop(microbatch)
            meta = self.inputs[self.groups[microbatch]]
            structure = meta.structure
            if self.has_backward:
                for tensor, expected in zip(received, meta.outputs, strict=True):
                    if expected.requires_grad:
                        tensor.requires_grad_()
        kwargs = self.data.kwargs[microbatch]

        def call(tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
            if structure is None:
                return args, kwargs
            value = structure.rebuild(tensors)
            return (tuple(value) if type(value) in (tuple, list) else (value,)), kwargs

        value = self.program.forward(microbatch, received, call)
        if self.stage.is_last:
            self._finish(microbatch, value)
            return
        outputs = normalize_outputs(value)
        leaves = outputs.leaves
        group = self.groups[microbatch]
        expected_out = self.outputs.get(group)
        if expected_out is None:
            self.outputs[group] = self._learned(value)
        else:
            self._check(microbatch, expected_out, leaves, outputs.structure)
        if self.has_backward:
            metas = self.outputs[group].outputs
            self._roots[microbatch] = [leaf for leaf, meta in zip(leaves, metas, strict=True) if meta.requires_grad]
        if self.following is None:
            self._out[microbatch] = leaves
        else:
            # The next stage may change its inputs in place, and this one may need them in its backward: a copy for each.
            self.following.inputs.setdefault(group, self.outputs[group])
            self.following._in[microbatch] = tuple(leaf.detach().clone() for leaf in leaves)

    def send_f(self, microbatch: int) -> None:
        """Post the send of the outputs."""
        tensors = self._out.pop(microbatch)
        ops = self._send_f(microbatch, max(1, len(tensors)))
        if microbatch in self._headed_out:
            payload = encode(self.outputs[self.groups[microbatch]])
            self._sent_f[microbatch] = send_values(self._transport, ops[0], payload, [t.detach() for t in tensors])
        elif tensors:
            batch = [Send(op, tensor.detach()) for op, tensor in zip(ops, tensors, strict=True)]
            self._sent_f[microbatch] = self._transport.post(batch)

    def wait_f(self, microbatch: int) -> None:
        """Wait until the outputs are sent."""
        _wait(self._sent_f, microbatch)

    # Backward.

    def recv_b(self, microbatch: int) -> None:
        """Post the receive of the outputs' gradients."""
        assert self._after is not None  # lowering posts receives only where another rank sends
        self._after.expect(
            Expected(
                (False, self.index, microbatch),
                functools.partial(self._recv_b, microbatch),
                functools.partial(self._grad_metas, microbatch),
            )
        )

    def await_b(self, microbatch: int) -> None:
        """Wait for the outputs' gradients."""
        assert self._after is not None
        self._grads_in[microbatch] = self._after.take((False, self.index, microbatch))

    def backward(self, microbatch: int) -> None:
        """Run the whole backward and keep the inputs' gradients."""
        roots = self._roots.pop(microbatch)
        if self.stage.is_last:
            grads = [self._weight(self.data.weights[microbatch], root) for root in roots]
        else:
            pairs = zip(roots, self._grads_in.pop(microbatch), strict=True)
            used = [(root, grad) for root, grad in pairs if root.requires_grad]
            roots, grads = [root for root, _ in used], [grad for _, grad in used]
        found = self.program.backward(microbatch, Kind.B, roots, grads)
        if self.stage.is_first:
            return
        metas = plain(self.inputs[self.groups[microbatch]].outputs, self.index)
        # Both ends know from the same metas which gradients cross; one that is missing is zero.
        mine = [
            meta.without_grad().empty(self.stage.device).zero_() if grad is None else grad
            for grad, meta in zip(found, metas, strict=True)
            if meta.requires_grad
        ]
        if self.previous is None:
            self._grads_out[microbatch] = mine
        else:
            self.previous._grads_in[microbatch] = tuple(mine)

    def send_b(self, microbatch: int) -> None:
        """Post the send of the inputs' gradients."""
        grads = self._grads_out.pop(microbatch)
        if grads:
            ops = self._send_b(microbatch, len(grads))
            # Nobody else uses these gradients: the transport may hand over the memory itself.
            batch = [Send(op, grad, owned=True) for op, grad in zip(ops, grads, strict=True)]
            self._sent_b[microbatch] = self._transport.post(batch)

    def wait_b(self, microbatch: int) -> None:
        """Wait until the inputs' gradients are sent."""
        _wait(self._sent_b, microbatch)

    def _input_metas(self, microbatch: int) -> Sequence[TensorMeta] | None:
        meta = self.inputs.get(self.groups[microbatch])
        return None if meta is None else [output.without_grad() for output in plain(meta.outputs, self.index)]

    def _grad_metas(self, microbatch: int) -> Sequence[TensorMeta] | None:
        meta = self.outputs.get(self.groups[microbatch])
        return (
            None
            if meta is None
            else [output.without_grad() for output in plain(meta.outputs, self.index) if output.requires_grad]
        )

    def _weight(self, weight: float, loss: torch.Tensor) -> torch.Tensor:
        key = (weight, loss.dtype, loss.device)
        if key not in self._weights:
            self._weights[key] = torch.tensor(weight, dtype=loss.dtype, device=loss.device)
        return self._weights[key]

    def _finish(self, microbatch: int, value: Any) -> None:
        """The last stage's outputs: the loss from them, and what the caller wants of them."""
        data = self.data
        roots = []
        if self._loss_fn is not None and (self.has_backward or data.targets is not None):
            target = None if data.targets is None else data.targets[microbatch]
            loss = self._loss_fn(value) if target is None else self._loss_fn(value, target)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
                raise StageUsageError(f"loss_fn must return a tensor with one element, got {got}")
            loss = loss.reshape(())
            data.losses[microbatch] = loss.detach()
            if loss.requires_grad:
                roots.append(loss)
        if self.has_backward:
            self._roots[microbatch] = roots
        if data.keep_outputs:
            outputs = normalize_outputs(value)
            data.outputs[microbatch] = outputs.structure.rebuild([leaf.detach() for leaf in outputs.leaves])

    def _learned(self, value: Any) -> ForwardMeta:
        """What the outputs look like, from the first of them; what was declared of them loses."""
        actual = forward_meta(value, self.index)
        declared = self.stage.declared_outputs
        if declared is not None:
            validate(
                declared.outputs,
                actual.outputs,
                what="output",
                stage=self.index,
                mode="warn",
                ignore=() if self.has_backward else ("requires_grad",),
                hint="What the stage really returned counts, since not every stage declares its values.",
            )
        return actual

    def _check(self, microbatch: int, expected: ForwardMeta, leaves: Sequence[torch.Tensor], structure: Any) -> None:
        """Refuse outputs that are not what was agreed on, before any of them is sent."""
        if structure == expected.structure and all(
            leaf.shape == meta.shape
            and leaf.dtype == meta.dtype
            # An output that needs no gradient where one is expected is fine: that gradient is not used.
            and not (self.has_backward and leaf.requires_grad and not meta.requires_grad)
            for leaf, meta in zip(leaves, expected.outputs, strict=True)
        ):
            return
        if structure != expected.structure and len(leaves) == len(expected.outputs):
            raise PipeliningMetadataError(
                f"stage {self.index}, microbatch {microbatch}: the outputs' structure was agreed to be {expected.structure},"
                f" but is {structure}; a stage returns the same structure for every microbatch",
                stage=self.index,
            )
        validate(
            expected.outputs,
            extract_metas(leaves),
            what="output",
            stage=self.index,
            ignore=() if self.has_backward else ("requires_grad",),
            hint=f"This came in microbatch {microbatch}. A stage's outputs depend on its inputs' shapes only: return the same for"
            " inputs of the same shape.",
        )


def _ops(kind: OpKind, edge: Edge, stage: int) -> Callable[[int, int], Sequence[Op]]:
    """Ops of one kind by microbatch and number of tensors; made once each."""
    made: dict[tuple[int, int], tuple[Op, ...]] = {}

    def ops(microbatch: int, count: int) -> tuple[Op, ...]:
        found = made.get((microbatch, count))
        if found is None:
            found = made[microbatch, count] = tuple(Op(kind, edge, stage, microbatch, i) for i in range(count))
        return found

    return ops


def _wait(handles: dict[int, Handle], microbatch: int) -> None:
    handle = handles.pop(microbatch, None)
    if handle is not None:  # nothing was sent where nothing needs a gradient
        handle.wait()


_NO_DATA = StepData((), (), None, (), False)
