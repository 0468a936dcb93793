"""What a stage under torch's schedules remembers, and what stages tell each other before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from stepwell_meta import AnyMeta, ForwardMeta, extract_metas
from stepwell_p2p import Transport

from .._compat import tree_flatten
from ._agree import Word
from ._looks import LinkLooks
from ._torch_run import OpsTransport, TorchRun


@attrs.define
class RecvInfo:
    """What a stage receives, or takes from the caller. Mutable: the buffer comes and goes.

    Attributes:
        input_name: what to call it.
        source: the stage that it comes from; None where it comes from the caller.
        buffer: where it is being received, from the receive until it is used.
        tensor_meta: what it looks like; None where nothing comes.
        is_root_arg: whether it comes from the caller.
        order: its place among what is received at once.
    """

    input_name: str
    source: int | None
    buffer: torch.Tensor | None
    tensor_meta: AnyMeta | None
    is_root_arg: bool = False
    order: int = 0

    def __repr__(self) -> str:
        if self.is_root_arg:
            return f"RecvInfo({self.input_name}, from the caller, {self.tensor_meta})"
        state = "no buffer" if self.buffer is None else f"buffer {tuple(self.buffer.shape)}"
        return f"RecvInfo({self.input_name}, from stage {self.source}, {self.tensor_meta}, {state})"


@attrs.frozen
class Verdict:
    """What the vote says so far; torch's schedules ask for its ``item``, 1 for static.

    Attributes:
        word: what all stages up to this one said.
    """

    word: Word

    def item(self) -> int:
        """1 if every stage declared its values."""
        return int(self.word.static)


@attrs.frozen(eq=False)
class HandedForward:
    """What a stage finds out forward, for the next one on the same rank: its outputs, and what they look like."""

    values: Sequence[torch.Tensor]
    look: ForwardMeta


@attrs.frozen(eq=False)
class HandedBackward:
    """What a stage finds out backward, for the one before on the same rank: the gradients of its inputs."""

    values: Sequence[torch.Tensor | None]


@attrs.define
class TorchState:
    """What a stage is under a schedule of torch. Mutable: it is found out bit by bit, see the module's table."""

    has_backward: bool = False
    ranks: dict[int, int] | None = None
    transport: Transport | None = None
    chunks: int | None = None
    verdict: Verdict | None = None
    heard: dict[tuple[int, int], LinkLooks] = attrs.field(factory=dict)
    probe: TorchRun | None = None
    value: Any = None
    ops: OpsTransport | None = None
    run: TorchRun | None = None
    output_chunks: list[Any] = attrs.field(factory=list)
    args_recv_info: dict[int, tuple[RecvInfo, ...]] = attrs.field(factory=dict)
    act_send_info: dict[int, list[int]] = attrs.field(factory=dict)
    grad_recv_info: dict[int, tuple[RecvInfo, ...]] = attrs.field(factory=dict)


def own(value: Any) -> Any:
    """A copy of a tensor for a run that must leave no trace, and no path of autograd either."""
    if not isinstance(value, torch.Tensor):
        return value
    copy: torch.Tensor = value.detach().clone().requires_grad_(value.requires_grad)
    return copy


def describe(state: TorchState, run: TorchRun, args: Any) -> None:
    """Fill in what comes from where and goes where.

    Args:
        state: where to.
        run: what runs the stage; it knows what crosses.
        args: on the first stage, one microbatch's arguments, or None to leave what is known of them.
    """
    index = run.index
    count = 0 if run.output_meta is None else len(run.output_meta.outputs)
    state.act_send_info = {number: [] for number in range(count)}
    outs: list[tuple[int, int, AnyMeta | None]] = []
    for out in run.out_links.values():
        looks = run.looks[index, out.place.destination]
        metas = looks.values[0].outputs
        grads = iter(looks.grads_of(0) or [])
        for number, meta in zip(out.numbers(len(metas)), metas, strict=True):
            state.act_send_info[number].append(out.place.destination)
            outs.append((number, out.place.destination, next(grads, None) if meta.requires_grad else None))
    for microbatch in range(run.chunks):
        if args is not None or not run.stage.is_first:
            state.args_recv_info[microbatch] = tuple(_described_inputs(run, args))
        state.grad_recv_info[microbatch] = tuple(
            RecvInfo(f"gradient of output {number} of stage {index} from stage {source}", source, None, meta)
            for number, source, meta in outs
        )


def input_metas(run: TorchRun, args: Any) -> tuple[AnyMeta, ...]:
    """What a stage's inputs look like, by number; those of the first from its arguments."""
    if run.stage.is_first:
        return tuple(extract_metas([leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)]))
    found: dict[int, AnyMeta] = {}
    for link in run.in_links.values():
        metas = run.looks[link.place.source, run.index].values[0].outputs
        found.update(zip(link.positions or range(len(metas)), metas, strict=True))
    return tuple(found[number] for number in sorted(found))


def _described_inputs(run: TorchRun, args: Any) -> list[RecvInfo]:
    if run.stage.is_first:
        metas = input_metas(run, args)
        return [RecvInfo(f"argument {n}", None, None, meta, is_root_arg=True) for n, meta in enumerate(metas)]
    sources: dict[int, tuple[int, int]] = {}
    for link in run.in_links.values():
        values = run.looks[link.place.source, run.index].values[0].outputs
        for number in link.positions or range(len(values)):
            sources[number] = (link.place.source, len(sources))
    return [
        RecvInfo(f"input {n} of stage {run.index}", sources[n][0], None, meta, order=sources[n][1])
        for n, meta in enumerate(input_metas(run, ()))
    ]
