"""One stage during steps: where its microbatches' values are, and the actions that move them.

Every method named like an action is that action for one microbatch. The executor binds them into a flat list once; a step then
only calls down the list.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from stepwell_meta import ForwardMeta, TensorMeta, extract_metas, normalize_outputs, validate
from stepwell_meta.exceptions import PipeliningMetadataError, UnsupportedValueError

from ..exceptions import StageUsageError
from ..plan._action import Kind
from ._draws import Draws
from ._laid_out import gaps_of
from ._lent import Lent
from ._link import InLink, OutLink
from ._looks import LinkLooks, forward_meta, same_look
from ._loss import take_apart

if TYPE_CHECKING:
    from ._stage import PipelineStage


@attrs.define
class StepData:
    """What one call of step or eval brings and takes, for the stages of this rank. Mutable: results are filled in.

    Attributes:
        args: positional arguments of each microbatch, on the first stage's rank.
        kwargs: keyword arguments of each microbatch.
        targets: targets of each microbatch, on the last stage's rank; None where the loss takes none.
        weights: weight of each microbatch's loss.
        keep_outputs: whether the last stage keeps its outputs.
        check_output: called with the outputs of the first microbatch that has any, where they are kept.
        losses: loss of each microbatch, by number.
        named: its named parts, if it has any.
        outputs: outputs of each microbatch, by number.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None
    weights: Sequence[float]
    keep_outputs: bool
    check_output: Callable[[Any], object] = lambda output: None
    losses: dict[int, torch.Tensor] = attrs.field(factory=dict)
    named: dict[int, dict[str, torch.Tensor]] = attrs.field(factory=dict)
    outputs: dict[int, Any] = attrs.field(factory=dict)


@attrs.frozen
class Known:
    """What a rank knows of a step under one way of cutting the batch; its dicts fill up as it learns.

    Attributes:
        groups: for each microbatch its group; microbatches of one group look the same.
        outputs: for each stage of this rank, what each group's outputs look like, once known.
        links: for each link of this rank's stages, what crosses it.
    """

    groups: Sequence[int]
    outputs: Mapping[int, dict[int, ForwardMeta]]
    links: Mapping[tuple[int, int], LinkLooks]


class StageRun:
    """One stage under one schedule; mutable, used by one thread.

    Actions that only pass values between ranks (``send_f``, ``recv_f``, ``wait_f``, the waits ``await_f`` for what was received,
    and the same of gradients) are the links' own methods, or all of them in one call where there are several links.

    Args:
        stage: the stage.
        in_links: links from earlier stages, by ascending source.
        out_links: links to later stages, by ascending destination.
        loss_fn: the loss, on the last stage.
        has_backward: whether the schedule has backwards.
        draws: looks at what forwards draw, where ranks are threads and there is a backward.

    Attributes:
        data: what the step under way brings and takes.
    """

    def __init__(
        self,
        stage: PipelineStage,
        in_links: Sequence[InLink],
        out_links: Sequence[OutLink],
        loss_fn: Callable[..., torch.Tensor] | None,
        *,
        has_backward: bool,
        draws: Draws | None = None,
    ) -> None:
        self.stage = stage
        self.index = stage.stage_index
        self.program = stage.program
        self.has_backward = has_backward
        self.in_links = {link.place.source: link for link in in_links}
        self.out_links = {link.place.destination: link for link in out_links}
        self.data = _NO_DATA
        self._ins = tuple(self.in_links.values())
        self._outs = tuple(self.out_links.values())
        self._is_last = stage.is_last
        positions = [link.positions for link in self._ins]
        # Where each received tensor goes; None: the values of the one stage before, in their structure.
        self._positions = None if None in positions else [place for places in positions for place in places or ()]
        remote_in = [link for link in in_links if not link.is_local]
        remote_out = [link for link in out_links if not link.is_local]
        self.recv_f = each(link.recv for link in remote_in)
        self.await_f = each(link.arrive for link in remote_in)
        self.send_f = each(link.send for link in remote_out)
        self.wait_f = each(link.wait for link in remote_out)
        self.recv_b = each(link.recv for link in remote_out)
        self.await_b = each(link.arrive for link in remote_out)
        self.send_b = each(link.send for link in remote_in)
        self.wait_b = each(link.wait for link in remote_in)
        self._loss_fn = loss_fn
        self._draws = draws
        self._lent: Lent | None = None
        self._groups: Sequence[int] = ()
        self._outputs: dict[int, ForwardMeta] = {}
        self._weights: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}
        # Of microbatches under way: what backward starts from, by number of the output; of the last stage the loss alone.
        self._roots: dict[int, dict[int, torch.Tensor]] = {}
        if draws is not None:
            self.forward = draws.around(self.forward, self._roots)  # type: ignore[assignment, method-assign]

    def know(self, known: Known) -> None:
        """Take what is known of the step to come."""
        self._groups, self._outputs = known.groups, known.outputs[self.index]

    def begin(self, data: StepData, *, is_new: bool) -> None:
        """A step begins, with this, which may be cut in a new way."""
        self.data = data
        if self._draws is not None:
            self._draws.begin(training=getattr(self.stage.submodule, "training", None), is_new=is_new)

    def clear(self) -> None:
        """Let go of every value, at the end of a step or after a failure."""
        self.data = _NO_DATA
        self._lent = None
        self._roots.clear()
        for link in (*self._ins, *self._outs):
            link.clear()
        clear = getattr(self.program, "clear", None)  # programs may have it, see StageProgram
        if clear is not None:
            clear()

    # Forward.

    def forward(self, microbatch: int) -> Any:
        """Run the module, and on the last stage the loss; gives what the module returned."""
        received: Sequence[torch.Tensor] = ()
        for link in self._ins:
            values = link.take(microbatch, with_grad=self.has_backward)
            received = [*received, *values] if received else values
        value = self.program.forward(microbatch, received, functools.partial(self._call, microbatch))
        if self._lent is not None:
            self._check_lent(self._lent)
        if self._is_last:
            self._finish(microbatch, value)
            return value
        outputs = normalize_outputs(value)
        leaves = outputs.leaves
        group = self._groups[microbatch]
        look = self._outputs.get(group)
        if look is None:
            look = self._outputs[group] = self._learned(value)
        else:
            self._check(microbatch, look, leaves, outputs.structure)
        if self.has_backward:
            pairs = enumerate(zip(leaves, look.outputs, strict=True))
            self._roots[microbatch] = {number: leaf for number, (leaf, meta) in pairs if meta.requires_grad}
        for out in self._outs:
            out.give(microbatch, leaves, look)
        return value

    # Backward.

    def backward(self, microbatch: int) -> None:
        """Run the whole backward and keep the inputs' gradients."""
        roots, grads = self._start(microbatch)
        self._end(microbatch, self.program.backward(microbatch, Kind.B, roots, grads))

    def backward_input(self, microbatch: int) -> None:
        """Run the part of the backward that other stages wait for, and keep the inputs' gradients."""
        roots, grads = self._start(microbatch)
        self._end(microbatch, self.program.backward(microbatch, Kind.I, roots, grads))

    def backward_weight(self, microbatch: int) -> None:
        """Run the rest of the backward."""
        self.program.backward(microbatch, Kind.W, (), ())

    def recv_from(self, kind: Kind, peer: int) -> Callable[[int], None]:
        """What posts, for a microbatch, the receive of values (RECV_F) or gradients (RECV_B) from one stage alone."""
        return self.in_links[peer].recv if kind is Kind.RECV_F else self.out_links[peer].recv

    # Of all microbatches at once.

    def unshard(self, _: None) -> None:
        """Gather the parameters."""
        self.program.unshard()

    def reshard(self, _: None) -> None:
        """Free what was gathered."""
        self.program.reshard()

    def reduce_grads(self, _: None) -> None:
        """Reduce the gradients of the whole step."""
        self.program.reduce_grads()

    def _start(self, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """From what a backward starts: outputs that require grad, with their gradients; of the last stage the loss."""
        roots = self._roots.pop(microbatch)
        if self._is_last:
            return list(roots.values()), [self._weight(self.data.weights[microbatch], loss) for loss in roots.values()]
        grads: dict[int, torch.Tensor] = {}
        # In one process the latest user's gradient comes first, and the others are added to it in that order.
        for link in reversed(self._outs):
            for number, grad in link.take(microbatch):
                grads[number] = grads[number] + grad if number in grads else grad
        used = [number for number, root in roots.items() if number in grads and root.requires_grad]
        return [roots[number] for number in used], [grads[number] for number in used]

    def _end(self, microbatch: int, found: Sequence[torch.Tensor | None]) -> None:
        """Give the gradients of the received tensors to the links that they came by."""
        if len(self._ins) == 1:
            self._ins[0].give(microbatch, found)
            return
        position = 0
        for link in self._ins:
            count = len(link.crossing(microbatch).metas)
            link.give(microbatch, found[position : position + count])
            position += count

    def _call(self, microbatch: int, received: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The module's arguments, from the received tensors; the first stage's from the caller's."""
        kwargs = self.data.kwargs[microbatch]
        if not self._ins:
            return self.data.args[microbatch], kwargs
        if self._positions is None:
            crossing = self._ins[0].crossing(microbatch)
            if crossing.lent:
                self._lent = Lent(received, crossing.lent)
            if crossing.is_flat:
                return tuple(received), kwargs
            value = crossing.structure.rebuild(received)
            return (tuple(value) if type(value) in (tuple, list) else (value,)), kwargs
        numbers: list[int] = []
        position = 0
        for link in self._ins:
            crossing = link.crossing(microbatch)
            numbers += [position + number for number in crossing.lent]
            position += len(crossing.metas)
        if numbers:
            self._lent = Lent(received, numbers)
        args = dict(zip(self._positions, received, strict=True))
        return tuple(args[position] for position in range(len(args))), kwargs

    def _check_lent(self, lent: Lent) -> None:
        self._lent = None
        written = lent.written()
        if written is not None:
            written = written if self._positions is None else self._positions[written]
            raise StageUsageError(
                f"stage {self.index} writes in place to its input {written}, which shares memory with another value, here or"
                " when it first came, or goes to another stage too: in one process both would change, but each stage has a copy:"
                " write to a .clone() of it, or let the stage that returns it return copies"
            )

    def _weight(self, weight: float, loss: torch.Tensor) -> torch.Tensor:
        key = (weight, loss.dtype, loss.device)
        if key not in self._weights:
            if len(self._weights) >= _MOST_WEIGHTS:  # token counts bring new numbers in every step
                self._weights.clear()
            self._weights[key] = torch.tensor(weight, dtype=loss.dtype, device=loss.device)
        return self._weights[key]

    def _finish(self, microbatch: int, value: Any) -> None:
        """The last stage's outputs: the loss from them, and what the caller wants of them."""
        data = self.data
        roots = {}
        if self._loss_fn is not None and (self.has_backward or data.targets is not None):
            target = None if data.targets is None else data.targets[microbatch]
            loss, named = take_apart(self._loss_fn(value) if target is None else self._loss_fn(value, target))
            data.losses[microbatch] = loss.detach()
            data.named[microbatch] = named
            if self.has_backward and data.weights[microbatch] != 0:  # of no weight: nothing flows back, even from a NaN
                if not loss.requires_grad:
                    raise StageUsageError(
                        f"the loss of microbatch {microbatch} depends on nothing that requires grad, so there is nothing to run"
                        " backward: parameters are frozen, it was computed from detached values or without gradients, or a"
                        " checkpoint(use_reentrant=True) had inputs without grad (use_reentrant=False has no such limit)"
                    )
                roots[0] = loss
        if self.has_backward:
            self._roots[microbatch] = roots
        if data.keep_outputs:
            try:
                outputs = normalize_outputs(value)
            except UnsupportedValueError as error:
                raise StageUsageError(
                    f"{error.path or 'what the last stage returns'} is a {error.type_name}, which cannot be put together from"
                    " those of all microbatches: return tensors and plain values in its place, or pass return_outputs=False"
                ) from error
            kept = outputs.structure.rebuild([leaf.detach() for leaf in outputs.leaves])
            if not data.outputs:
                data.check_output(kept)
            data.outputs[microbatch] = kept

    def _learned(self, value: Any) -> ForwardMeta:
        """What the outputs look like, from the first of them; what was declared of them loses."""
        actual = forward_meta(value)
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
        if structure is expected.structure or structure == expected.structure:
            for leaf, meta in zip(leaves, expected.outputs, strict=True):
                # An output that needs no gradient where one is expected is fine: that gradient is not used.
                if not same_look(leaf, meta) or (self.has_backward and leaf.requires_grad and not meta.requires_grad):
                    break
                if type(meta) is TensorMeta and leaf.stride() != meta.stride:
                    self._check_gaps(leaf, meta)
            else:
                return
        if structure != expected.structure and len(leaves) == len(expected.outputs):
            raise PipeliningMetadataError(
                f"stage {self.index}, microbatch {microbatch}: the outputs' structure was agreed to be {expected.structure},"
                f" but is {structure}; return the same structure for every microbatch, or build the stages with"
                ' shapes="dynamic"',
                stage=self.index,
            )
        hint = (
            f"This came in microbatch {microbatch}. Inputs of one shape give outputs of one shape: if these depend on the data,"
            ' build the stages with shapes="dynamic".'
        )
        if len(leaves) == len(expected.outputs) and all(map(same_look, leaves, expected.outputs)):
            hint = (
                f"This came in microbatch {microbatch}: no gradient would come back for it. Where parameters of this stage or an"
                " earlier one require grad that did not in the first step (unfreezing layer by layer), make a new executor after"
                ' each such change; where it depends on the data, build the stages with shapes="dynamic".'
            )
        validate(
            expected.outputs,
            extract_metas(leaves),
            what="output",
            stage=self.index,
            ignore=() if self.has_backward else ("requires_grad",),
            hint=hint,
        )

    def _check_gaps(self, leaf: torch.Tensor, meta: TensorMeta) -> None:
        """Whether an output has gaps where the next stage was told of some, which gives it some: see ``_laid_out``."""
        if gaps_of(TensorMeta.from_tensor(leaf)) == gaps_of(meta):
            return
        declared = self.stage.declared_outputs is not None
        where = "was declared with" if declared else "in an earlier microbatch"
        what = (
            f"stage {self.index}: an output of shape {tuple(leaf.shape)} has strides {leaf.stride()}, but {where} {meta.stride}."
            " Of only one of these a reshape() is a copy, so where the next stage changes that in place, numbers are not those of"
            " one process: return it .contiguous()"
        )
        if not declared:
            raise StageUsageError(what)
        warnings.warn(what, stacklevel=2)


def each(calls: Iterable[Callable[[int], None]]) -> Callable[[int], None]:
    """One call that makes all of these; the call itself where there is one."""
    chosen = tuple(calls)
    if len(chosen) == 1:
        return chosen[0]

    def call_all(microbatch: int) -> None:
        for call in chosen:
            call(microbatch)

    return call_all


_MOST_WEIGHTS = 256
_NO_DATA = StepData((), (), None, (), False)
