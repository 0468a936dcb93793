"""A transport that writes down what is posted, and one that goes wrong on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import torch

from ._fabrics import die
from ._step import Post, Step, Wait
from ._transport import Handle, Recv, Rules, Send, Transport
from .exceptions import P2PUsageError


class _Wrapper:
    """Passes everything on to an inner transport."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.inner.size

    @property
    def rules(self) -> Rules:
        """Those of the inner transport."""
        return self.inner.rules

    def abort(
        self, reason: str, *, stage: int | None = None, microbatch: int | None = None, action: str | None = None
    ) -> None:
        """See :meth:`stepwell_p2p.Transport.abort`."""
        self.inner.abort(reason, stage=stage, microbatch=microbatch, action=action)

    def close(self) -> None:
        """See :meth:`stepwell_p2p.Transport.close`."""
        self.inner.close()


class RecordingTransport(_Wrapper):
    """Writes down what a rank posts and waits for, in the form that ``prove_order`` takes.

    Example::

        recorders = [RecordingTransport(fabric.transport(rank)) for rank in range(2)]
        ...                                                        # a step
        prove_order([recorder.steps for recorder in recorders], "shared", Rules(tagged=False, rendezvous=True))

    Attributes:
        steps: posts and waits, in order.
        sizes: bytes of each message sent, in order.

    Args:
        inner: what carries the messages.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.steps: list[Step] = []
        self.sizes: list[int] = []

    def post(self, batch: Sequence[Send | Recv]) -> Handle:
        """Write the batch down and pass it on."""
        handle = self.inner.post(batch)
        self.steps.append(Post(item.op for item in batch))
        self.sizes += [item.tensor.nbytes for item in batch if isinstance(item, Send)]
        return _RecordedHandle(handle, self.steps, len(self.steps) - 1)


class _RecordedHandle:
    def __init__(self, handle: Handle, steps: list[Step], post: int) -> None:
        self._handle = handle
        self._steps = steps
        self._post = post

    def wait(self) -> tuple[torch.Tensor, ...]:
        self._steps.append(Wait(self._post))
        return self._handle.wait()


@attrs.frozen
class Fault:
    """One thing that goes wrong: at a rank's n-th message, counted from 0 over all that it posts.

    Attributes:
        kind: ``"drop"`` (a send never leaves), ``"delay"`` (a send leaves ``seconds`` later), ``"duplicate"`` (a send leaves
            twice), ``"reorder"`` (a send leaves after the next one), ``"truncate"`` (a send leaves without its last element),
            or ``"kill"`` (the rank ends, see :func:`stepwell_p2p.testing.die`).
        at: which message; all but ``"kill"`` act on the first send from there on.
        seconds: of a delay.
    """

    kind: str
    at: int
    seconds: float = 0.5

    def __attrs_post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise P2PUsageError(f"no fault is named {self.kind!r}; there are {', '.join(map(repr, _KINDS))}")


_KINDS = ("drop", "delay", "duplicate", "reorder", "truncate", "kill")


class FaultyTransport(_Wrapper):
    """Goes wrong at given messages: to see that what stands above notices, and that nothing hangs.

    As long as anything is to go wrong, each message of a batch is posted by itself, so that one can without the others.

    Args:
        inner: what carries the messages.
        faults: what goes wrong, and when.
        kill: what ``"kill"`` does.
    """

    def __init__(self, inner: Transport, faults: Sequence[Fault], *, kill: Callable[[], None] = die) -> None:
        super().__init__(inner)
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self._kill = kill
        self._count = 0
        self._held: list[Send] = []

    def post(self, batch: Sequence[Send | Recv]) -> Handle:
        """Post what is left of the batch."""
        if not self._faults and not self._held:
            return self.inner.post(batch)
        handles: list[Handle] = []
        for item in batch:
            fault = self._due(item)
            self._count += 1
            if isinstance(item, Send):
                handles += [self.inner.post([send]) for send in self._spoil(item, fault)]
            else:
                handles.append(self.inner.post([item]))
        return _Several(handles)

    def _due(self, item: Send | Recv) -> Fault | None:
        for fault in self._faults:
            if fault.at <= self._count and (fault.kind == "kill" or isinstance(item, Send)):
                self._faults.remove(fault)
                if fault.kind == "kill":
                    self._kill()
                return fault
        return None

    def _spoil(self, send: Send, fault: Fault | None) -> list[Send]:
        late, self._held = self._held, []
        kind = fault.kind if fault is not None else ""
        if kind == "reorder":
            self._held = [attrs.evolve(send, tensor=send.tensor.clone())]
            return late
        if kind == "drop":
            return late
        if kind == "delay" and fault is not None:
            time.sleep(fault.seconds)
        if kind == "truncate":
            send = attrs.evolve(send, tensor=send.tensor.reshape(-1)[:-1])
        return [send, send, *late] if kind == "duplicate" else [send, *late]


class _Several:
    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for handle in self._handles for tensor in handle.wait())
