"""The two ends of a link: values from one stage to a later one, and their gradients back.

Both ends hold the same facts about what crosses (:class:`LinkLooks`), learned from the messages themselves or declared
beforehand, and derive everything from them: how many tensors there are, which of them bring a gradient back, and what those
look like. So they cannot disagree. Tensors cross as plain local ones; a DTensor is made again from mesh, placements and sizes
that its meta names.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from stepwell_mesh import MeshCache
from stepwell_meta import (
    AnyMeta,
    BackwardMeta,
    DTensorMeta,
    ForwardMeta,
    TensorMeta,
    decode,
    encode,
    extract_metas,
    normalize_outputs,
    to_local_if_dtensor,
)
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Edge, Handle, Op, OpKind, Send, Transport, Wire, send_values

from ._classes import with_classes
from ._inbox import Expected, Inbox, Key, Learn


@attrs.define
class LinkLooks:
    """What crosses a link, by group of microbatches. Mutable: it is learned.

    Attributes:
        values: the values, and how they are put together to arguments.
        grads: the gradients of those values that require grad, in order. Known beforehand for plain tensors, whose gradients look
            like themselves; learned from the first that comes where there are DTensors, whose gradients may be placed otherwise.
    """

    values: dict[int, ForwardMeta] = attrs.field(factory=dict)
    grads: dict[int, BackwardMeta] = attrs.field(factory=dict)

    def grads_of(self, group: int) -> Sequence[AnyMeta | None] | None:
        """What the gradients look like, or None where that is not known."""
        if group in self.grads:
            return self.grads[group].input_grads
        metas = [meta for meta in self.values[group].outputs if meta.requires_grad]
        if any(isinstance(meta, DTensorMeta) for meta in metas):
            return None
        return [meta.without_grad() for meta in metas]


def select(outputs: ForwardMeta, wires: tuple[Wire, ...] | None) -> ForwardMeta:
    """What of a stage's outputs crosses a link.

    Raises:
        PipeliningMetadataError: a wire starts at an output that is not there.
    """
    if wires is None:
        return outputs
    missing = [wire for wire in wires if wire.output >= len(outputs.outputs)]
    if missing:
        raise PipeliningMetadataError(
            f"{missing[0]} starts at output {missing[0].output} of stage {missing[0].source}, which returns"
            f" {len(outputs.outputs)} tensors",
            stage=missing[0].source,
        )
    flat = normalize_outputs(tuple(torch.empty(0) for _ in wires)).structure
    return ForwardMeta(tuple(outputs.outputs[wire.output] for wire in wires), flat)


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
    """

    source: int
    destination: int
    edge: Edge
    wires: tuple[Wire, ...] | None = None
    first_message: int = 0
    first_gradient: int = 0


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
        self._transport = transport
        self._inbox = inbox
        self._meshes = meshes
        self._device = device
        self._sent: dict[int, Handle] = {}
        self._values: dict[int, list[torch.Tensor]] = {}
        self._grads: dict[int, list[torch.Tensor]] = {}
        self._recv_ops: Callable[[int, int], Sequence[Op]]

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
        self.groups, self.looks, self.firsts, self.first_grads = groups, looks, firsts, first_grads

    def clear(self) -> None:
        """Let go of every value."""
        for slots in (self._values, self._grads, self._sent):
            slots.clear()

    def recv(self, microbatch: int) -> None:
        """Post the receive of what the other end sends."""
        assert self._inbox is not None
        look = functools.partial(self._look, microbatch)
        self._inbox.expect(Expected(self._key(microbatch), functools.partial(self._recv_ops, microbatch), look))

    @abc.abstractmethod
    def _look(self, microbatch: int) -> Sequence[TensorMeta] | Learn | None:
        """What will come; see :class:`Expected`."""

    @abc.abstractmethod
    def _key(self, microbatch: int) -> Key:
        """Under which key it comes."""

    def wait(self, microbatch: int) -> None:
        """Wait until what was sent is there."""
        handle = self._sent.pop(microbatch, None)
        if handle is not None:  # nothing was sent where nothing needs a gradient
            handle.wait()

    def _whole(self, local: torch.Tensor, meta: AnyMeta) -> torch.Tensor:
        """A received tensor as its meta describes it."""
        return meta.from_local(local, self._meshes.get(meta.mesh_key)) if isinstance(meta, DTensorMeta) else local

    def _dtensor_grads(self, microbatch: int) -> bool:
        """Whether the gradients of this microbatch come behind a header."""
        return microbatch in self.first_grads and self.looks.grads_of(self.groups[microbatch]) is None


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
        self._recv_ops = _numbered(OpKind.RECV_F, place.edge, place.source, place.first_message)
        self._classes = tuple(classes)
        self._send_ops = _numbered(OpKind.SEND_B, place.edge.reverse, place.destination, place.first_gradient)

    @property
    def positions(self) -> tuple[int, ...] | None:
        """At which of the stage's inputs the values enter; None: all of them, in the chain's structure."""
        return None if self.place.wires is None else tuple(wire.input for wire in self.place.wires)

    def arrive(self, microbatch: int) -> None:
        """Wait for the values."""
        assert self._inbox is not None
        tensors = self._inbox.take(self._key(microbatch))
        metas = self.looks.values[self.groups[microbatch]].outputs
        self._values[microbatch] = [self._whole(t, meta) for t, meta in zip(tensors, metas, strict=True)]

    def put(self, microbatch: int, values: list[torch.Tensor]) -> None:
        """Take the values from the other end, on the same rank."""
        self._values[microbatch] = values

    def take(self, microbatch: int, *, with_grad: bool) -> list[torch.Tensor]:
        """Give the values away, as leaves of autograd."""
        values = self._values.pop(microbatch)
        if with_grad:
            for value, meta in zip(values, self.looks.values[self.groups[microbatch]].outputs, strict=True):
                if meta.requires_grad:
                    value.requires_grad_()
        return values

    def give(self, microbatch: int, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of all values from the stage, and keep those that the other end waits for."""
        group = self.groups[microbatch]
        metas = self.looks.values[group].outputs
        wanted = [(grad, meta) for grad, meta in zip(grads, metas, strict=True) if meta.requires_grad]
        if self.other is not None:
            self.other.put(microbatch, [self._or_zeros(grad, meta) for grad, meta in wanted])
            return
        looks = self.looks.grads_of(group)
        if looks is None:
            # The first of DTensors: placed as it is, and from now on so.
            mine = [grad if grad is not None else self._or_zeros(None, meta) for grad, meta in wanted]
        else:
            mine = []
            for number, ((grad, _), look) in enumerate(zip(wanted, looks, strict=True)):
                if look is not None:
                    mine.append(self._or_zeros(grad, look))
                elif grad is not None:
                    raise PipeliningMetadataError(
                        f"stage {self.place.destination}: value {number} from stage {self.place.source} got a gradient, but"
                        " was declared to have none (None in input_grads or output_grads): declare it, or declare that the"
                        " value does not require grad",
                        stage=self.place.destination,
                    )
        self._grads[microbatch] = mine

    def send(self, microbatch: int) -> None:
        """Post the send of the gradients."""
        grads = self._grads.pop(microbatch)
        group = self.groups[microbatch]
        locals_ = [to_local_if_dtensor(grad, detach=True) for grad in grads]
        ops = self._send_ops(microbatch, max(1, len(grads)))
        if grads and self._dtensor_grads(microbatch):
            meta = self.looks.grads[group] = BackwardMeta(extract_metas(grads))
            self._sent[microbatch] = send_values(self._transport, ops[0], encode(meta), locals_)
        elif grads:
            # Nobody else uses these gradients: the transport may hand over the memory itself.
            batch = [Send(op, grad, owned=True) for op, grad in zip(ops, locals_, strict=True)]
            self._sent[microbatch] = self._transport.post(batch)

    def _or_zeros(self, grad: torch.Tensor | None, meta: AnyMeta) -> torch.Tensor:
        if grad is not None:
            if isinstance(meta, DTensorMeta) and isinstance(grad, DTensor) and grad.placements != meta.placements:
                return grad.redistribute(placements=meta.placements)  # what the other end counts on since the first
            return grad
        if isinstance(meta, DTensorMeta):
            return meta.without_grad().empty(self._device, self._meshes.get(meta.mesh_key)).zero_()
        return meta.without_grad().empty(self._device).zero_()

    def _learn(self, group: int, payload: bytes) -> None:
        self.looks.values[group] = with_classes(decode(payload), self._classes)

    def _look(self, microbatch: int) -> Sequence[TensorMeta] | Learn | None:
        group = self.groups[microbatch]
        meta = self.looks.values.get(group)
        if meta is not None:
            return [_local(output) for output in meta.outputs]
        if microbatch in self.firsts:
            return functools.partial(self._learn, group)
        return None

    def _key(self, microbatch: int) -> Key:
        return (True, self.place.destination, self.place.source, microbatch)


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
        self._send_ops = _numbered(OpKind.SEND_F, place.edge, place.source, place.first_message)
        self._recv_ops = _numbered(OpKind.RECV_B, place.edge.reverse, place.destination, place.first_gradient)
        self._unsaid: dict[int, ForwardMeta] = {}  # what the first of a group looks like, until that is sent

    def numbers(self, count: int) -> Sequence[int]:
        """Which of the stage's outputs cross here."""
        return range(count) if self.place.wires is None else [wire.output for wire in self.place.wires]

    def give(self, microbatch: int, leaves: Sequence[torch.Tensor], outputs: ForwardMeta) -> None:
        """Take the stage's outputs, and keep (or hand over) those that cross here."""
        group = self.groups[microbatch]
        look = None if group in self.looks.values else select(outputs, self.place.wires)
        values = [leaves[number].detach() for number in self.numbers(len(leaves))]
        if self.other is not None:
            if look is not None:
                self.looks.values[group] = look
            # The other stage may change its inputs in place, and this one may need them in its backward: a copy for each.
            self.other.put(microbatch, [value.clone() for value in values])
            return
        self._values[microbatch] = values
        if look is not None:
            self._unsaid[group] = look

    def send(self, microbatch: int) -> None:
        """Post the send of the values."""
        values = [to_local_if_dtensor(value) for value in self._values.pop(microbatch)]
        group = self.groups[microbatch]
        ops = self._send_ops(microbatch, max(1, len(values)))
        if group not in self.looks.values:
            look = self.looks.values[group] = self._unsaid.pop(group)
            self._sent[microbatch] = send_values(self._transport, ops[0], encode(look), values)
        elif values:
            batch = [Send(op, value) for op, value in zip(ops, values, strict=True)]
            self._sent[microbatch] = self._transport.post(batch)

    def arrive(self, microbatch: int) -> None:
        """Wait for the gradients."""
        assert self._inbox is not None
        tensors = self._inbox.take(self._key(microbatch))
        looks = self.looks.grads_of(self.groups[microbatch]) or ()
        metas = [meta for meta in looks if meta is not None]
        self._grads[microbatch] = [self._whole(t, meta) for t, meta in zip(tensors, metas, strict=True)]

    def put(self, microbatch: int, grads: list[torch.Tensor]) -> None:
        """Take the gradients from the other end, on the same rank."""
        self._grads[microbatch] = grads

    def take(self, microbatch: int) -> list[tuple[int, torch.Tensor]]:
        """Give the gradients away, each with the number of the output that it belongs to."""
        group = self.groups[microbatch]
        metas = self.looks.values[group].outputs
        numbers = self.numbers(len(metas))
        wanted = [number for number, meta in zip(numbers, metas, strict=True) if meta.requires_grad]
        known = self.looks.grads.get(group)
        if known is not None and self.other is None:
            wanted = [number for number, meta in zip(wanted, known.input_grads, strict=True) if meta is not None]
        return list(zip(wanted, self._grads.pop(microbatch), strict=True))

    def _look(self, microbatch: int) -> Sequence[TensorMeta] | Learn | None:
        group = self.groups[microbatch]
        if group not in self.looks.values:
            return None
        looks = self.looks.grads_of(group)
        if looks is not None:
            return [_local(meta) for meta in looks if meta is not None]
        if microbatch in self.first_grads:
            return lambda payload: self.looks.grads.__setitem__(group, decode(payload))
        return None

    def _key(self, microbatch: int) -> Key:
        return (False, self.place.source, self.place.destination, microbatch)


def forward_meta(value: Any) -> ForwardMeta:
    """Metas and structure of a stage's outputs, or of an example of them."""
    outputs = normalize_outputs(value)
    return ForwardMeta(extract_metas(outputs.leaves), outputs.structure)


def same_look(tensor: torch.Tensor, meta: AnyMeta) -> bool:
    """Whether a tensor fits a meta in all that crosses: shape, dtype, and how it is spread over a mesh."""
    if isinstance(meta, DTensorMeta):
        return isinstance(tensor, DTensor) and DTensorMeta.from_dtensor(tensor).without_grad() == meta.without_grad()
    return tensor.shape == meta.shape and tensor.dtype == meta.dtype and not isinstance(tensor, DTensor)


def _local(meta: AnyMeta) -> TensorMeta:
    return (meta.local if isinstance(meta, DTensorMeta) else meta).without_grad()


def _numbered(kind: OpKind, edge: Edge, stage: int, first: int) -> Callable[[int, int], Sequence[Op]]:
    """Ops of one kind by microbatch and number of tensors; made once each, since they never change."""
    made: dict[tuple[int, int], tuple[Op, ...]] = {}

    def ops(microbatch: int, count: int) -> tuple[Op, ...]:
        found = made.get((microbatch, count))
        if found is None:
            found = made[microbatch, count] = tuple(Op(kind, edge, stage, microbatch, first + i) for i in range(count))
        return found

    return ops
