"""Receives from one rank, posted in the order in which that rank sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import torch

from stepwell_meta import ForwardMeta, TensorMeta, decode
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import Handle, Op, Recv, Transport, receive_values

Key: TypeAlias = tuple[bool, int, int]  # forward?, stage, microbatch


@attrs.frozen(eq=False)
class Expected:
    """One value set that will come.

    Attributes:
        key: what it is.
        ops: from the number of tensors to their ops, which do not change from step to step.
        metas: what the tensors look like, or None while that is not known.
        learn: takes what the message itself says they look like; None where that has been agreed before.
    """

    key: Key
    ops: Callable[[int], Sequence[Op]]
    metas: Callable[[], Sequence[TensorMeta] | None]
    learn: Callable[[ForwardMeta], None] | None = None


class Inbox:
    """All receives from one rank; one object per source, used for one step at a time.

    A receive can be posted once it is known what will come. What is not known yet comes behind a header, and is received only
    when it is needed; whatever that rank sends after it then waits in line, so that both ends see one order.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._line: deque[Expected] = deque()
        self._handles: dict[Key, Handle] = {}
        self._arrived: dict[Key, tuple[torch.Tensor, ...]] = {}

    def expect(self, expected: Expected) -> None:
        """Post the receive now if that can be, else as soon as it can."""
        self._line.append(expected)
        self._post()

    def take(self, key: Key) -> tuple[torch.Tensor, ...]:
        """Wait for a value set and give it away."""
        while True:
            self._post()  # what was not known when it was expected may be known now
            handle = self._handles.pop(key, None)
            if handle is not None:
                return handle.wait()
            if key in self._arrived:
                return self._arrived.pop(key)
            head = self._line.popleft()
            if head.learn is None:
                raise PipeliningMetadataError(
                    f"what crosses to stage {head.key[1]} in microbatch {head.key[2]} is not known yet",
                    stage=head.key[1],
                )
            payload, tensors = receive_values(self._transport, head.ops(1)[0])
            head.learn(decode(payload))
            self._arrived[head.key] = tuple(tensors)

    def clear(self) -> None:
        """Forget everything, after a failure."""
        self._line.clear()
        self._handles.clear()
        self._arrived.clear()

    def _post(self) -> None:
        while self._line:
            head = self._line[0]
            metas = None if head.learn else head.metas()
            if metas is None:
                return
            self._line.popleft()
            if metas:
                batch = [Recv(op, meta) for op, meta in zip(head.ops(len(metas)), metas, strict=True)]
                self._handles[head.key] = self._transport.post(batch)
            else:
                self._arrived[head.key] = ()
