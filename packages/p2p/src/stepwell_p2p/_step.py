"""What one rank does, as far as communication goes."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ._op import Op
from .exceptions import P2PUsageError


def _to_ops(ops: Iterable[Op]) -> tuple[Op, ...]:
    try:
        return tuple(ops)
    except TypeError as error:
        raise P2PUsageError(f"a Post has several Ops, got {ops!r}: write Post([…])") from error


@attrs.frozen
class Post:
    """A step of one rank: start messages, as one batch, without waiting.

    Attributes:
        ops: this rank's ends of them.
        label: the action, for messages.
    """

    ops: tuple[Op, ...] = attrs.field(converter=_to_ops)
    label: str = ""


@attrs.frozen
class Wait:
    """A step of one rank: block until every message of an earlier batch is done.

    Attributes:
        post: the index, in this rank's sequence, of the :class:`Post`.
        label: the action, for messages.
    """

    post: int
    label: str = ""


@attrs.frozen
class Work:
    """A step of one rank that neither starts nor waits for anything."""

    label: str = ""


Step = Post | Wait | Work
