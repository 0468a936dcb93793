"""The two ends of a link: values from one stage to a later one, and their gradients back.

Both ends hold the same facts about what crosses (:class:`LinkLooks`), learned from the messages themselves or declared
beforehand, and derive everything from them: how many tensors there are, which of them bring a gradient back, and what those
look like. So they cannot disagree. Tensors cross as plain local ones; a DTensor is made again from mesh, placements and sizes
that its meta names.
"""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import NoneType

import attrs
import torch
from torch.distributed.tensor import DTensor

from stepwell_mesh import MeshCache
from stepwell_meta import (
    AnyMeta,
    BackwardMeta,
    DTensorMeta,
    ForwardMeta,
    decode,
    encode,
    extract_metas,
    overlaps,
    to_local_if_dtensor,
)
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Edge, Handle, Op, OpKind, Packing, Send, Transport, Wire, send_values

from ..exceptions import StageUsageError
from ._classes import with_classes
from ._inbox import Coming, Expected, Going, Inbox, Learn
from ._laid_out import laid_out
from ._looks import Crossing, LinkLooks, select


@attrs.frozen
class LinkPlace:
    """Where a link is.

    Attributes:
        source: the stage that makes the values.
        destination: the stage that takes them.
        edge: their ranks.
        wires: which output goes into which input; None: all, in their structure.
        first_message: number of the link's first message among those that ``source`` sends.
        first_gradient: likewise of its first gradient among those that ``destination`` sends.
        packs: whether small values travel together; not where somebody else runs the messages, value by value.
        lent: which values later stages get too.
        later: which of the source's outputs the destination and later stages take; None: all.
    """

    source: int
    destination: int
    edge: Edge
    wires: tuple[Wire, ...] | None = None
    first_message: int = 0
    first_gradient: int = 0
    packs: bool = True
    lent: tuple[int, ...] = ()
    later: tuple[int, ...] | None = None


class _End(abc.ABC):
    """What both ends of a link have in common; mutable: it holds the values of microbatches under way.

    Args:
        place: where the link is.
        transport: what carries values.
        inbox: receives from the rank of the other end; None where that is this rank.
        meshes: this rank's meshes.
        device: of the stage at this end.
    """

    def __init__(
        self,
        place: LinkPlace,
        transport: Transport,
        inbox: Inbox | None,
        meshes: MeshCache,
        device: torch.device,
    ) -> None:
        self.place = place
        self.looks = LinkLooks()
        self.groups: Sequence[int] = ()
        self.firsts: frozenset[int] = frozenset()
        self.first_grads: frozenset[int] = frozenset()
        self._has_news = True  # of some group nothing has crossed yet
        self._transport = transport
        self._inbox = inbox
        self._meshes = meshes
        self._device = device
        self._crossings: dict[int, Crossing] = {}  # by group; and by microbatch:
        self._known: dict[int, Crossing] = {}
        self._ready: dict[int, Coming] = {}
        self._leaving: dict[int, Going] = {}
        self._coming: dict[int, Handle] = {}
        self._sent: dict[int, Handle] = {}
        self._values: dict[int, Sequence[torch.Tensor]] = {}
        self._grads: dict[int, Sequence[torch.Tensor]] = {}
        self._recv_ops: Callable[[int, int], Sequence[Op]]
        self._sender = self._taker = -1  # stages, of what is received here

    @property
    def is_local(self) -> bool:
        """Whether the other end is on this rank."""
        return self._inbox is None

    def know(
        self, groups: Sequence[int], looks: LinkLooks, firsts: frozenset[int], first_grads: frozenset[int]
    ) -> None:
        """Take what is known of the step to come.

        Args:
            groups: for each microbatch its group; those of one group look the same.
            looks: what crosses; completed as it is learned.
            firsts: of each group the microbatch whose values are sent first.
            first_grads: of each group the microbatch whose gradients are sent first.
        """
        if groups is not self.groups or looks is not self.looks:
            self._forget()
            self._has_news = True
        self.groups, self.looks, self.firsts, self.first_grads = groups, looks, firsts, first_grads

    def clear(self) -> None:
        """Let go of every value."""
        for slots in (self._values, self._grads, self._sent, self._coming):
            slots.clear()

    def crossing(self, microbatch: int) -> Crossing:
        """What crosses in a microbatch, whose values' looks are known."""
        return self._known.get(microbatch) or self._find(microbatch)

    def recv(self, microbatch: int) -> None:
        """Post the receive of what the other end sends, unless that was done before the step was known to be like the last."""
        if microbatch in self._coming:
            return
        inbox = self._inbox
        assert inbox is not None
        ready = self._ready.get(microbatch)
        if ready is not None and not inbox.line:
            self._coming[microbatch] = ready.post(self._transport)
            return
        expected = self._coming[microbatch] = Expected(
            inbox,
            source=self._sender,
            destination=self._taker,
            microbatch=microbatch,
            op=self._recv_ops(microbatch, 1)[0],
            look=functools.partial(self._look, microbatch),
        )
        inbox.expect(expected)

    @abc.abstractmethod
    def _look(self, microbatch: int) -> Coming | Learn | None:
        """What will come; see :class:`Expected`."""

    def _find(self, microbatch: int) -> Crossing:
        group = self.groups[microbatch]
        found = self._crossings.get(group)
        if found is None:
            found = self._crossings[group] = Crossing.of(
                self.looks, group, packs=self.place.packs, lent=self.place.lent
            )
        self._known[microbatch] = found
        return found

    def _forget(self) -> None:
        """What was worked out does not hold any more."""
        for table in (self._crossings, self._known, self._ready, self._leaving):
            table.clear()

    def _receives(self, microbatch: int, packing: Packing, count: int) -> Coming:
        """The receives of a microbatch, of which all is known now: made once."""
        ready = self._ready[microbatch] = Coming(packing.recvs(self._recv_ops(microbatch, count)), packing)
        return ready

    def _learn_grads(self, group: int, grads: BackwardMeta) -> None:
        self.looks.grads[group] = grads
        self._forget()

    def wait(self, microbatch: int) -> None:
        """Wait until what was sent is there."""
        handle = self._sent.pop(microbatch, None)
        if handle is not None:  # nothing was sent where nothing needs a gradient
            handle.wait()

    def _whole(self, local: torch.Tensor, meta: AnyMeta) -> torch.Tensor:
        """A received tensor as its meta describes it."""
        return meta.from_local(local, self._meshes.get(meta.mesh_key)) if isinstance(meta, DTensorMeta) else local


class InLink(_End):
    """The end at the stage that takes the values and gives their gradients."""

    def __init__(
        self,
        place: LinkPlace,
        transport: Transport,
        inbox: Inbox | None,
        meshes: MeshCache,
        device: torch.device,
        classes: Iterable[type] = (),
    ) -> None:
        super().__init__(place, transport, inbox, meshes, device)
        self.other: OutLink | None = None  # the other end, where it is local
        self._sender, self._taker = place.source, place.destination
        self._recv_ops = _numbered(OpKind.RECV_F, place.edge, place.source, place.first_message)
        self._classes = tuple(classes)
        self._send_ops = _numbered(OpKind.SEND_B, place.edge.reverse, place.destination, place.first_gradient)

    @property
    def positions(self) -> tuple[int, ...] | None:
        """At which of the stage's inputs the values enter; None: all of them, in the chain's structure."""
        return None if self.place.wires is None else tuple(wire.input for wire in self.place.wires)

    def arrive(self, microbatch: int) -> None:
        """Wait for the values."""
        tensors: Sequence[torch.Tensor] = self._coming.pop(microbatch).wait()
        crossing = self.crossing(microbatch)
        if crossing.has_dtensors:
            tensors = [self._whole(t, meta) for t, meta in zip(tensors, crossing.metas, strict=True)]
        if crossing.gaps:
            tensors = list(tensors)
            for number, strides in crossing.gaps:
                tensors[number] = laid_out(tensors[number], strides)
        self._values[microbatch] = tensors

    def drop(self, microbatch: int) -> None:
        """Wait for what :meth:`OutLink.send_nothing` sends."""
        self._coming.pop(microbatch).wait()

    def put(self, microbatch: int, values: Sequence[torch.Tensor]) -> None:
        """Take copies of values from the other end, on the same rank: either stage may change its own in place."""
        gaps = dict(self.crossing(microbatch).gaps)
        self._values[microbatch] = [
            laid_out(value.detach(), gaps[number]) if number in gaps else value.detach().clone()
            for number, value in enumerate(values)
        ]

    def take(self, microbatch: int, *, with_grad: bool) -> Sequence[torch.Tensor]:
        """Give the values away, as leaves of autograd."""
        values = self._values.pop(microbatch)
        if with_grad:
            for number in self.crossing(microbatch).wanted:
                values[number].requires_grad_()
        return values

    def give(self, microbatch: int, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of all values from the stage, and keep those that the other end waits for."""
        crossing = self.crossing(microbatch)
        metas = crossing.metas
        if self.other is not None:
            self.other.put(microbatch, [self._or_zeros(grads[n], metas[n]) for n in crossing.wanted])
            return
        if crossing.back is None:
            # The first of DTensors: placed as it is, and from now on so.
            self._grads[microbatch] = [self._or_zeros(grads[n], metas[n], as_it_is=True) for n in crossing.wanted]
            return
        if len(crossing.back) != len(crossing.wanted):
            for number in crossing.wanted:
                if grads[number] is not None and number not in crossing.back:
                    raise PipeliningMetadataError(
                        f"stage {self.place.destination}: value {number} from stage {self.place.source} got a gradient, but"
                        " was declared to have none (None in input_grads or output_grads): declare it, or declare that the"
                        " value does not require grad",
                        stage=self.place.destination,
                    )
        mine = [grads[number] for number in crossing.back]
        if crossing.has_dtensors or NoneType in map(type, mine):
            mine = [self._or_zeros(grad, meta) for grad, meta in zip(mine, crossing.back_metas, strict=True)]
        self._grads[microbatch] = mine  # type: ignore[assignment]  # none of them is None now

    def send(self, microbatch: int) -> None:
        """Post the send of the gradients."""
        grads = self._grads.pop(microbatch)
        if not grads:
            return
        locals_ = [g if type(g) is torch.Tensor else to_local_if_dtensor(g, detach=True) for g in grads]
        going = self._leaving.get(microbatch)
        if going is None:
            crossing = self.crossing(microbatch)
            if crossing.back is None and microbatch in self.first_grads:
                meta = BackwardMeta(extract_metas(grads))
                self._learn_grads(self.groups[microbatch], meta)
                op = self._send_ops(microbatch, 1)[0]
                self._sent[microbatch] = send_values(self._transport, op, encode(meta), locals_)
                return
            # Nobody else uses these gradients: the transport may hand over the memory itself.
            ops = self._send_ops(microbatch, len(locals_))
            going = self._leaving[microbatch] = Going(ops, crossing.grads_packing, owned=True)
        self._sent[microbatch] = going.post(self._transport, locals_)

    def _or_zeros(self, grad: torch.Tensor | None, meta: AnyMeta, *, as_it_is: bool = False) -> torch.Tensor:
        if grad is not None:
            if (
                isinstance(meta, DTensorMeta)
                and not as_it_is
                and isinstance(grad, DTensor)
                and grad.placements != meta.placements
            ):
                return grad.redistribute(placements=meta.placements)  # what the other end counts on since the first
            return grad
        if isinstance(meta, DTensorMeta):
            return meta.without_grad().empty(self._device, self._meshes.get(meta.mesh_key)).zero_()
        return meta.without_grad().empty(self._device).zero_()

    def _learn(self, group: int, payload: bytes) -> None:
        look, self.looks.shared[group] = decode(payload)
        self.looks.values[group] = with_classes(look, self._classes)

    def _look(self, microbatch: int) -> Coming | Learn | None:
        group = self.groups[microbatch]
        if group in self.looks.values:
            crossing = self.crossing(microbatch)
            return self._receives(microbatch, crossing.values_packing, len(crossing.metas))
        if microbatch in self.firsts:
            return functools.partial(self._learn, group)
        return None


class OutLink(_End):
    """The end at the stage that makes the values and takes their gradients."""

    def __init__(
        self,
        place: LinkPlace,
        transport: Transport,
        inbox: Inbox | None,
        meshes: MeshCache,
        device: torch.device,
    ) -> None:
        super().__init__(place, transport, inbox, meshes, device)
        self.other: InLink | None = None  # the other end, where it is local
        self._sender, self._taker = place.destination, place.source
        self._send_ops = _numbered(OpKind.SEND_F, place.edge, place.source, place.first_message)
        self._recv_ops = _numbered(OpKind.RECV_B, place.edge.reverse, place.destination, place.first_gradient)
        self._unsaid: dict[int, ForwardMeta] = {}  # what the first of a group looks like, until that is sent
        self._numbers = None if place.wires is None else tuple(wire.output for wire in place.wires)

    def clear(self) -> None:
        """Let go of every value."""
        super().clear()
        self._unsaid.clear()

    def numbers(self, count: int) -> Sequence[int]:
        """Which of the stage's outputs cross here."""
        return range(count) if self._numbers is None else self._numbers

    def give(self, microbatch: int, leaves: Sequence[torch.Tensor], outputs: ForwardMeta) -> None:
        """Take the stage's outputs, and keep (or hand over) those that cross here."""
        shared = self._sharing(leaves) if len(leaves) > 1 else ()
        if self._has_news or shared:
            self._look_at(microbatch, shared, outputs)
        values = leaves if self._numbers is None else [leaves[number] for number in self._numbers]
        if self.other is not None:
            self.other.put(microbatch, values)
            return
        # They leave at some time later. What autograd does not keep from changing until then (a buffer that the stage moves on)
        # leaves as it is now.
        self._values[microbatch] = [v.detach() if v.requires_grad else v.clone() for v in values]

    def _sharing(self, leaves: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Which of the values share memory with others that the other stage, or a later one, takes."""
        if self.place.later is None:
            return tuple(sorted(overlaps(leaves)))
        later = [number for number in self.place.later if number < len(leaves)]  # of others a wire is refused elsewhere
        shared = {later[at] for at in overlaps([leaves[number] for number in later])}
        return tuple(at for at, number in enumerate(self.numbers(len(leaves))) if number in shared)

    def _look_at(self, microbatch: int, shared: tuple[int, ...], outputs: ForwardMeta) -> None:
        """Learn what the first outputs of a group show, and refuse others that show more."""
        group = self.groups[microbatch]
        told = self.looks.shared.get(group)
        if told is None:
            self.looks.shared[group] = shared
            if group not in self.looks.values:
                looks = self._unsaid if self.other is None else self.looks.values
                looks[group] = select(outputs, self.place.wires)
            elif shared and self.other is None:  # all was declared: nothing more is said to the other stage
                warnings.warn(
                    f"outputs of stage {self.place.source} share memory ({list(shared)} of what stage {self.place.destination}"
                    " takes), which stages that declare their values do not tell one another: if the latter writes to one of"
                    " them in place, the others do not change as they do in one process: return copies",
                    stacklevel=2,
                )
        elif not set(shared) <= set(told):
            raise StageUsageError(
                f"outputs of stage {self.place.source} share memory in microbatch {microbatch} ({list(shared)} of what stage"
                f" {self.place.destination} takes), and did not at first, when that stage was told of it, which may write to"
                " them in place: let the stage that returns them return a .clone() where one is another or a part of it"
            )
        self._has_news = any(group not in self.looks.shared for group in self.groups)

    def send(self, microbatch: int) -> None:
        """Post the send of the values."""
        values = self._values.pop(microbatch)
        locals_ = [v if type(v) is torch.Tensor else to_local_if_dtensor(v) for v in values]
        going = self._leaving.get(microbatch)
        if going is None:
            group = self.groups[microbatch]
            if group not in self.looks.values:
                op = self._send_ops(microbatch, 1)[0]
                look = self.looks.values[group] = self._unsaid.pop(group)
                self._sent[microbatch] = send_values(
                    self._transport, op, encode((look, self.looks.shared[group])), locals_
                )
                return
            if not locals_:
                return
            ops = self._send_ops(microbatch, len(locals_))
            going = self._leaving[microbatch] = Going(ops, self.crossing(microbatch).values_packing, owned=False)
        self._sent[microbatch] = going.post(self._transport, locals_)

    def send_nothing(self, microbatch: int) -> Handle | None:
        """Post the send of what the other end has begun to receive, for a step that is not like the last; it drops it."""
        crossing = self.crossing(microbatch)
        ops, messages = self._send_ops(microbatch, len(crossing.metas)), crossing.values_packing.messages
        batch = [Send(ops[index], meta.empty(self._device).zero_(), owned=True) for index, meta in messages]
        return self._transport.post(batch) if batch else None

    def arrive(self, microbatch: int) -> None:
        """Wait for the gradients."""
        tensors: Sequence[torch.Tensor] = self._coming.pop(microbatch).wait()
        crossing = self.crossing(microbatch)
        if crossing.has_dtensors:
            tensors = [self._whole(t, meta) for t, meta in zip(tensors, crossing.back_metas, strict=True)]
        self._grads[microbatch] = tensors

    def put(self, microbatch: int, grads: Sequence[torch.Tensor]) -> None:
        """Take the gradients from the other end, on the same rank."""
        self._grads[microbatch] = grads

    def take(self, microbatch: int) -> list[tuple[int, torch.Tensor]]:
        """Give the gradients away, each with the number of the output that it belongs to."""
        crossing = self.crossing(microbatch)
        back = crossing.wanted if self.other is not None or crossing.back is None else crossing.back
        grads = self._grads.pop(microbatch)
        if self._numbers is None:
            return list(zip(back, grads, strict=True))
        return [(self._numbers[position], grad) for position, grad in zip(back, grads, strict=True)]

    def _look(self, microbatch: int) -> Coming | Learn | None:
        group = self.groups[microbatch]
        if group not in self.looks.values:
            return None
        crossing = self.crossing(microbatch)
        if crossing.back is not None:
            return self._receives(microbatch, crossing.grads_packing, len(crossing.back))
        if microbatch in self.first_grads:
            return lambda payload: self._learn_grads(group, decode(payload))
        return None


def _numbered(kind: OpKind, edge: Edge, stage: int, first: int) -> Callable[[int, int], Sequence[Op]]:
    """Ops of one kind by microbatch and number of tensors; made once each, since they never change."""
    made: dict[tuple[int, int], tuple[Op, ...]] = {}

    def ops(microbatch: int, count: int) -> tuple[Op, ...]:
        found = made.get((microbatch, count))
        if found is None:
            found = made[microbatch, count] = tuple(Op(kind, edge, stage, microbatch, first + i) for i in range(count))
        return found

    return ops
