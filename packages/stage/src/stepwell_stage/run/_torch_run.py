"""A stage under schedules of torch: what :class:`StageRun` does, with messages left to the schedule.

The stage run posts its messages to an :class:`OpsTransport`, which keeps them as ``torch.distributed.P2POp``s; the schedule takes
these, runs them when it likes, and calls the stage when they are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from stepwell_meta import ForwardMeta, TensorMeta
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import C10dTransport, Edge, Handle, OpKind, Recv, Rules, Send, Transport

from .._compat import tree_flatten, tree_map
from ..exceptions import StageUsageError
from ..plan._action import Kind
from ..plan._wiring import Wiring
from ._inbox import Inbox
from ._link import InLink, LinkPlace, OutLink
from ._looks import LinkLooks
from ._program import StageProgram
from ._stage_run import Known, StageRun, StepData

if TYPE_CHECKING:
    from ._stage import PipelineStage


class OpsTransport:
    """Messages as torch's ops, for somebody else to start and wait for. Mutable: it keeps them until they are taken.

    Where messages of the process group may be under way in any order, as with gloo, an op starts its message on the stage's
    transport, so that waiting for it ends as soon as any rank fails. Backends that run a batch as one call, as NCCL does, get
    their own ops, whose waits end when the transport aborts their communicators.

    Torch's 1F1B waits for each send, which ends when it is received. Of a value that skips stages that may be far away: the first
    stage waits for the last, which takes its next value when the first has taken a gradient. So where backwards follow, these
    sends are waited for at the end of the step, by :meth:`finish`.

    Implements :class:`stepwell_p2p.Transport` but for its promise to start what is posted.

    Args:
        inner: what carries messages.
        ranks: the rank of each stage.
        has_backward: whether backwards follow.
    """

    def __init__(self, inner: Transport, ranks: Mapping[int, int], *, has_backward: bool) -> None:
        if not isinstance(inner, C10dTransport):
            raise StageUsageError(
                f"torch's schedules send over a process group, and a {type(inner).__qualname__} has none: give the stage a group,"
                " or run it with stepwell_stage.Executor"
            )
        self.rank = inner.rank
        self.size = inner.size
        self.rules: Rules = inner.rules
        self._inner = inner
        self._ranks = ranks
        self._has_backward = has_backward
        self._ops: list[dist.P2POp] = []
        self._under_way: list[Handle] = []

    def post(self, batch: Sequence[Send | Recv]) -> _Later:
        """Keep the messages; the handle is waited for when they have been run."""
        ops = self._inner.as_p2p_ops(batch)
        if self.rules.tagged:
            for item, op in zip(batch, ops, strict=True):
                op.op = _Verb(self._inner, item, self._under_way if self._skips(item) else None)
        self._ops += ops
        return _Later(
            [(item.meta, op, self._inner.device) for item, op in zip(batch, ops, strict=True) if isinstance(item, Recv)]
        )

    def take(self) -> list[dist.P2POp]:
        """The messages since the last call."""
        ops, self._ops = self._ops, []
        return ops

    def finish(self) -> None:
        """Wait for what nobody has waited for."""
        while self._under_way:
            self._under_way.pop().wait()

    def clear(self) -> None:
        """Forget it, after a failure."""
        self._under_way.clear()

    def _skips(self, item: Send | Recv) -> bool:
        """Whether it is a send, in a step with backwards, to a stage that is no neighbour."""
        if isinstance(item, Recv) or not self._has_backward:
            return False
        neighbour = item.op.stage + (1 if item.op.kind is OpKind.SEND_F else -1)
        return self._ranks.get(neighbour) != item.op.edge.destination

    def abort(self, reason: str, **where: Any) -> None:
        """Tell the other ranks."""
        self._inner.abort(reason, **where)

    def close(self) -> None:
        """Nothing: the transport belongs to the stage."""


class _Verb:
    """Stands in an op in the place of ``isend`` or ``irecv``: starts the message on a transport.

    Args:
        transport: which.
        item: the message.
        under_way: takes its handle where the schedule is not to wait for it.
    """

    def __init__(self, transport: Transport, item: Send | Recv, under_way: list[Handle] | None) -> None:
        self.__name__ = "isend" if isinstance(item, Send) else "irecv"  # for the op's printed form
        self._transport = transport
        self._item = item
        self._under_way = under_way

    def __call__(self, tensor: torch.Tensor, **_: Any) -> _Work:
        """Start it; group, peer and tag, which torch passes, are in the message."""
        item = self._item
        if isinstance(item, Recv):
            item = attrs.evolve(item, meta=TensorMeta.from_tensor(tensor), buffer=tensor)
        handle = self._transport.post([item])
        if self._under_way is None:
            return _Work(handle)
        self._under_way.append(handle)
        return _Work(None)


@attrs.frozen(eq=False)
class _Work:
    """What of a ``torch.distributed.Work`` schedules use."""

    handle: Handle | None

    def wait(self) -> bool:
        """Wait for the message, if there is one to wait for.

        Raises:
            PeerFailure: a rank failed.
            TransportError: the network failed, or the transport's time is over.
        """
        if self.handle is not None:
            self.handle.wait()
        return True


@attrs.frozen(eq=False)
class _Later:
    """A handle on messages that somebody else runs."""

    received: Sequence[tuple[TensorMeta, dist.P2POp, torch.device]]

    def wait(self) -> tuple[torch.Tensor, ...]:
        return tuple(_as_described(op.tensor, meta, device) for meta, op, device in self.received)


def _as_described(tensor: torch.Tensor, meta: TensorMeta, device: torch.device) -> torch.Tensor:
    stride = meta.as_dense().stride
    if tensor.device == device and tensor.stride() == stride:
        return tensor
    return torch.empty_strided(meta.shape, stride, dtype=meta.dtype, device=device).copy_(tensor)


class _HandedOut(OutLink):
    """A link to the next stage on the same rank: the schedule hands the values over."""

    def give(self, microbatch: int, leaves: Sequence[torch.Tensor], outputs: ForwardMeta) -> None:
        """Nothing, see above."""


class TorchRun(StageRun):
    """One stage under a schedule of torch; mutable, used by one thread.

    Args:
        stage: the stage.
        transport: an :class:`OpsTransport`, or while the stage finds out what crosses, one that sends.
        ranks: the rank of each stage.
        chunks: number of microbatches.
        has_backward: whether backwards follow.
        program: what computes.

    Attributes:
        looks: what crosses each link of this stage; all that it needs to know.
        input_grads: gradients of the received values of each microbatch, until they are sent or handed over.
    """

    def __init__(
        self,
        stage: PipelineStage,
        transport: Transport,
        ranks: Mapping[int, int],
        *,
        chunks: int,
        has_backward: bool,
        program: StageProgram,
    ) -> None:
        index = stage.stage_index
        wiring = Wiring(stage.num_stages, stage.wires)
        self._inboxes = {rank: Inbox(transport) for rank in range(transport.size) if rank != transport.rank}

        def place(source: int, destination: int) -> LinkPlace:
            return LinkPlace(
                source,
                destination,
                Edge(ranks[source], ranks[destination]),
                wiring.between(source, destination),
                wiring.first_message(source, destination),
                wiring.first_gradient(source, destination),
                packs=False,  # the schedule runs the messages, one for each value
            )

        ins = [
            InLink(
                place(source, index),
                transport,
                self._inboxes.get(ranks[source]),
                stage.meshes,
                stage.device,
                stage.classes,
            )
            for source in wiring.sources(index)
        ]
        outs = [
            (OutLink if ranks[destination] != ranks[index] else _HandedOut)(
                place(index, destination), transport, self._inboxes.get(ranks[destination]), stage.meshes, stage.device
            )
            for destination in wiring.destinations(index)
        ]
        super().__init__(stage, ins, outs, None, has_backward=has_backward)
        self.program = program
        self.chunks = chunks
        self.looks: dict[tuple[int, int], LinkLooks] = {}
        self.input_grads: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self.args: list[tuple[Any, ...]] = []
        self.kwargs: list[Mapping[str, Any]] = []
        self._arrivals: set[tuple[bool, int]] = set()
        self.clear()

    @property
    def output_meta(self) -> ForwardMeta | None:
        """What the stage's outputs look like, once known."""
        return self._outputs.get(0)

    def learn(
        self, looks: Mapping[tuple[int, int], LinkLooks], outputs: ForwardMeta | None, *, first: bool = False
    ) -> None:
        """Take what crosses.

        Args:
            looks: by link of this stage.
            outputs: what the stage returns, if known.
            first: whether nothing has crossed yet, so that messages say what they carry.
        """
        groups = [0] * self.chunks
        self.looks = dict(looks)
        known = Known(groups, {self.index: {} if outputs is None else {0: outputs}}, self.looks)
        self.know(known)
        firsts = frozenset((0,)) if first else frozenset[int]()
        for link in (*self.in_links.values(), *self.out_links.values()):
            link.know(groups, self.looks[link.place.source, link.place.destination], firsts, firsts)

    def clear(self) -> None:
        """Let go of every value, and be ready for the next step."""
        super().clear()
        for inbox in self._inboxes.values():
            inbox.clear()
        self.input_grads.clear()
        self._arrivals.clear()
        self.args = [()] * self.chunks
        self.kwargs = [{}] * self.chunks
        self.data = StepData(self.args, self.kwargs, None, (), keep_outputs=False)

    # Values.

    def expect(self, microbatch: int, *, forward: bool) -> None:
        """Note that inputs, or outputs' gradients, of a microbatch are on their way or here."""
        self._arrivals.add((forward, microbatch))

    def arrive(self, microbatch: int, *, forward: bool) -> None:
        """Wait for what was expected.

        Raises:
            PipeliningMetadataError: nothing was.
        """
        links = self.in_links if forward else self.out_links
        if links and (forward, microbatch) not in self._arrivals:
            what, how = ("inputs", "fwd") if forward else ("gradients of its outputs", "bwd")
            raise PipeliningMetadataError(
                f"stage {self.index}, microbatch {microbatch}: the {what} are not here: get_{how}_recv_ops or"
                f" set_local_{how}_input comes first",
                stage=self.index,
            )
        self._arrivals.discard((forward, microbatch))
        if forward:
            self.await_f(microbatch)
        else:
            self.await_b(microbatch)

    def hand_in(self, microbatch: int, leaves: Sequence[torch.Tensor]) -> None:
        """Take the values of the stage before, on the same rank."""
        link = self.in_links[self.index - 1]
        expected = self.looks[self.index - 1, self.index].values[0].outputs
        if link.place.wires is not None:
            leaves = [leaves[wire.output] for wire in link.place.wires if wire.output < len(leaves)]
        if len(leaves) != len(expected):
            raise PipeliningMetadataError(
                f"stage {self.index}, microbatch {microbatch}: expected {len(expected)} values from stage {self.index - 1},"
                f" got {len(leaves)}",
                stage=self.index,
            )
        link.put(microbatch, leaves)
        self.expect(microbatch, forward=True)

    def hand_back(self, microbatch: int, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients from the stage after, on the same rank: one, or None for zeros, for each value it took."""
        link = self.out_links[self.index + 1]
        looks = self.looks[self.index, self.index + 1]
        metas = looks.values[0].outputs
        if len(grads) != len(metas):
            raise PipeliningMetadataError(
                f"stage {self.index}, microbatch {microbatch}: expected {len(metas)} gradients from stage {self.index + 1}, one"
                f" for each value that it took, got {len(grads)}",
                stage=self.index,
            )
        numbers = link.numbers(len(metas))
        wanted = [i for i, meta in enumerate(metas) if meta.requires_grad]
        if 0 in looks.grads:
            wanted = [i for i, look in zip(wanted, looks.grads[0].input_grads, strict=True) if look is not None]
        roots = self._roots[microbatch]
        filled = ((grads[i], roots[numbers[i]]) for i in wanted)
        link.put(microbatch, [torch.zeros_like(root) if grad is None else grad for grad, root in filled])
        self.expect(microbatch, forward=False)

    # Computing.

    def run_backward(self, microbatch: int, kind: Kind, loss: torch.Tensor | None) -> None:
        """Run a backward, or a part; of B and I the gradients of the received values are kept."""
        roots: Sequence[torch.Tensor]
        grads: Sequence[torch.Tensor | None]
        if kind is Kind.W:
            roots, grads = (), ()
        elif self.stage.is_last:
            outputs = self._roots.pop(microbatch)
            given = list(outputs.values()) if loss is None else [loss]
            roots = [root for root in given if root.requires_grad]
            grads = [None] * len(roots)
        else:
            roots, grads = self._start(microbatch)
        found = self.program.backward(microbatch, kind, roots, grads)
        if kind is not Kind.W:
            self.input_grads[microbatch] = found

    def give_grads(self, microbatch: int) -> None:
        """Give the gradients to the links that the values came by.

        Raises:
            PipeliningMetadataError: there is one that nobody waits for, or no backward has run.
        """
        for link, part in self.parts(self.grads_of(microbatch)):
            looks = self.looks[link.place.source, self.index]
            wanted = [number for number, meta in enumerate(looks.values[0].outputs) if meta.requires_grad]
            if 0 in looks.grads:
                for number, look in zip(wanted, looks.grads[0].input_grads, strict=True):
                    if look is None and part[number] is not None:
                        raise PipeliningMetadataError(
                            f"stage {self.index}, microbatch {microbatch}: value {number} from stage {link.place.source} has a"
                            " gradient, but input_grads said, or the first microbatch showed, that it has none, so nobody waits"
                            " for it; declare it, or let the first microbatch have it",
                            stage=self.index,
                        )
            link.give(microbatch, part)

    def grads_of(self, microbatch: int) -> tuple[torch.Tensor | None, ...]:
        """Take the gradients of the received values, by input.

        Raises:
            PipeliningMetadataError: no backward has run.
        """
        if microbatch not in self.input_grads:
            raise PipeliningMetadataError(
                f"stage {self.index}, microbatch {microbatch}: there are no gradients of inputs: backward_one_chunk comes first",
                stage=self.index,
            )
        return self.input_grads.pop(microbatch)

    def parts(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[InLink, Sequence[torch.Tensor | None]]]:
        """Gradients of the received values, by the link that these came by."""
        found = []
        position = 0
        for link in self.in_links.values():
            count = len(self.looks[link.place.source, self.index].values[0].outputs)
            found.append((link, grads[position : position + count]))
            position += count
        return found

    def _finish(self, microbatch: int, value: Any) -> None:
        """The last stage's outputs: the schedule computes the loss."""
        if self.has_backward:
            leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            self._roots[microbatch] = dict(enumerate(leaves))
        if self.data.keep_outputs:
            self.data.outputs[microbatch] = tree_map(_detached, value)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
