"""Receives from one rank, posted in the order in which that rank sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import torch

from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import ExpectedValues, Handle, Op, Packing, Recv, Transport, expect_values

Learn: TypeAlias = Callable[[bytes], None]


@attrs.frozen(eq=False)
class Coming:
    """What will be received, once it is known: messages that carry several values.

    Attributes:
        batch: the receives, which do not change from step to step.
        packing: how to take them apart.
    """

    batch: Sequence[Recv]
    packing: Packing

    def post(self, transport: Transport) -> Handle:
        """Start to receive; the handle gives the values."""
        if not self.batch:
            return _NOTHING
        handle = transport.post(self.batch)
        return handle if self.packing.is_trivial else self.packing.unpack(handle)


@attrs.frozen(eq=False)
class Going:
    """What is sent in a microbatch, once that is known; its values come with each step.

    Attributes:
        ops: of the values.
        packing: how they travel.
        owned: whether their memory is given away.
    """

    ops: Sequence[Op]
    packing: Packing
    owned: bool = attrs.field(kw_only=True)

    def post(self, transport: Transport, values: Sequence[torch.Tensor]) -> Handle:
        """Start to send."""
        return transport.post(self.packing.sends(self.ops, values, owned=self.owned))


class Inbox:
    """All receives from one rank; one object per source, used for one step at a time.

    A receive can be posted once it is known what will come. Until then it waits in line, and what that rank sends after it too,
    so that both ends see one order. What comes behind a header holds up the line on transports that are first in, first out.
    """

    def __init__(self, transport: Transport) -> None:
        self.line: deque[Expected] = deque()
        self._transport = transport
        self._headed: deque[Expected] = deque()  # under way behind headers, in order

    def expect(self, expected: Expected) -> None:
        """Post the receive now if that can be, else as soon as it can."""
        self.line.append(expected)
        self._post()

    def clear(self) -> None:
        """Forget everything, after a failure."""
        self.line.clear()
        self._headed.clear()

    def bring(self, expected: Expected) -> None:
        """Wait for it, and for what has to come before it."""
        while expected.result is None:
            self._post()  # what was not known when it was expected may be known now
            if expected.handle is not None:
                self._finish(expected)
            elif self._headed:  # sent before what is asked for, and says how what follows it looks
                self._finish(self._headed[0])
            else:
                head = self.line.popleft()
                learn = head.look()
                if not callable(learn):
                    raise PipeliningMetadataError(
                        f"what stage {head.source} sends to stage {head.destination} in microbatch {head.microbatch} is not known"
                        " yet: the schedule asks for its gradient before its forward has run",
                        stage=head.destination,
                    )
                self._open(head, learn)
                self._finish(head)  # before anything behind it is posted

    def _finish(self, expected: Expected) -> None:
        assert expected.handle is not None
        expected.result = expected.handle.wait()
        if expected in self._headed:
            self._headed.remove(expected)

    def _open(self, head: Expected, learn: Learn) -> None:
        head.handle = _Headed(expect_values(self._transport, head.op), learn)
        self._headed.append(head)

    def _post(self) -> None:
        while self.line:
            head = self.line[0]
            look = head.look()
            if look is None:
                return
            if isinstance(look, Coming):
                head.handle = look.post(self._transport)
            elif self._transport.rules.tagged:
                self._open(head, look)
            else:
                return
            self.line.popleft()


class Expected:
    """Values of one link and microbatch that will come; a handle, see :class:`stepwell_p2p.Handle`. Mutable: they come.

    Args:
        inbox: where they come.
        source: the stage that sends them.
        destination: the stage that takes them.
        microbatch: of which microbatch they are.
        op: under which their header comes, where one does.
        look: what will come; or, where it comes behind a header, what takes the header's payload; or None while neither is known.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        source: int,
        destination: int,
        microbatch: int,
        op: Op,
        look: Callable[[], Coming | Learn | None],
    ) -> None:
        self.source = source
        self.destination = destination
        self.microbatch = microbatch
        self.op = op
        self.look = look
        self.handle: Handle | None = None
        self.result: tuple[torch.Tensor, ...] | None = None
        self._inbox = inbox

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Block until they are here."""
        self._inbox.bring(self)
        assert self.result is not None
        return self.result


class _Headed:
    """A handle on values behind a header; whoever waits learns what the header says."""

    def __init__(self, values: ExpectedValues, learn: Learn) -> None:
        self._values = values
        self._learn = learn

    def wait(self) -> tuple[torch.Tensor, ...]:
        payload, tensors = self._values.wait()
        self._learn(payload)
        return tensors


class _Nothing:
    """The handle where nothing crosses."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        return ()


_NOTHING = _Nothing()
