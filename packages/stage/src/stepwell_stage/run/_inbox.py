"""Receives from one rank, posted in the order in which that rank sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import torch

from stepwell_meta import TensorMeta
from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_p2p import ExpectedValues, Handle, Op, Recv, Transport, expect_values

Key: TypeAlias = tuple[bool, int, int, int]  # forward?, stage that takes it, stage that makes it, microbatch

Learn: TypeAlias = Callable[[bytes], None]


@attrs.frozen(eq=False)
class Expected:
    """Values of one link and microbatch that will come.

    Attributes:
        key: what they are.
        ops: from the number of tensors to their ops, which do not change from step to step.
        look: what the tensors look like; or, where they come behind a header, what takes the header's payload; or None while
            neither is known.
    """

    key: Key
    ops: Callable[[int], Sequence[Op]]
    look: Callable[[], Sequence[TensorMeta] | Learn | None]


class Inbox:
    """All receives from one rank; one object per source, used for one step at a time.

    A receive can be posted once it is known what will come. Until then it waits in line, and what that rank sends after it too,
    so that both ends see one order. What comes behind a header holds up the line on transports that are first in, first out.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._line: deque[Expected] = deque()
        self._under_way: dict[Key, Handle | tuple[ExpectedValues, Learn] | tuple[()]] = {}
        self._arrived: dict[Key, tuple[torch.Tensor, ...]] = {}

    def expect(self, expected: Expected) -> None:
        """Post the receive now if that can be, else as soon as it can."""
        self._line.append(expected)
        self._post()

    def take(self, key: Key) -> tuple[torch.Tensor, ...]:
        """Wait for what was expected under that key, and give it away."""
        while True:
            self._post()  # what was not known when it was expected may be known now
            if key in self._arrived:
                return self._arrived.pop(key)
            if key in self._under_way:
                return self._finish(self._under_way.pop(key))
            headed = next((k for k, value in self._under_way.items() if isinstance(value, tuple) and value), None)
            if headed is not None:  # sent before what is asked for, and says how what follows it looks
                self._arrived[headed] = self._finish(self._under_way.pop(headed))
                continue
            head = self._line.popleft()
            learn = head.look()
            if not callable(learn):
                raise PipeliningMetadataError(
                    f"what stage {head.key[2]} sends to stage {head.key[1]} in microbatch {head.key[3]} is not known yet: the"
                    " schedule asks for its gradient before its forward has run",
                    stage=head.key[1],
                )
            self._arrived[head.key] = self._finish((expect_values(self._transport, head.ops(1)[0]), learn))

    def clear(self) -> None:
        """Forget everything, after a failure."""
        self._line.clear()
        self._under_way.clear()
        self._arrived.clear()

    def _finish(self, under_way: Handle | tuple[ExpectedValues, Learn] | tuple[()]) -> tuple[torch.Tensor, ...]:
        if not isinstance(under_way, tuple):
            return under_way.wait()
        if not under_way:
            return ()
        values, learn = under_way
        payload, tensors = values.wait()
        learn(payload)
        return tensors

    def _post(self) -> None:
        while self._line:
            head = self._line[0]
            look = head.look()
            if look is None:
                return
            if callable(look):
                if not self._transport.rules.tagged:
                    return
                self._under_way[head.key] = (expect_values(self._transport, head.ops(1)[0]), look)
            elif look:
                batch = [Recv(op, meta) for op, meta in zip(head.ops(len(look)), look, strict=True)]
                self._under_way[head.key] = self._transport.post(batch)
            else:
                self._under_way[head.key] = ()
            self._line.popleft()
