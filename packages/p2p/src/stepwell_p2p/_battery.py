"""What any transport must do, as programs that run on its ranks.

Each program is one promise of :class:`stepwell_p2p.Transport`. It is written so that it neither blocks nor mixes messages up
under the weakest rules (first in, first out on one shared channel, sends that complete when received): what only matching by op
allows is behind ``transport.rules.tagged``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from . import _promised_endings, _promised_order, _promised_values
from ._check import Check, TransportCheckError
from ._fabrics import Fabric

TRANSPORT_CHECKS: list[Check] = _promised_values.CHECKS + _promised_order.CHECKS + _promised_endings.CHECKS
"""The whole battery, for those who want one test for each check."""


def check_transport(
    make_fabric: Callable[[int], Fabric], *, checks: Iterable[Check] | None = None, deadline: float = 60.0
) -> None:
    """Try every promise of :class:`stepwell_p2p.Transport` on a transport of yours.

    Example::

        check_transport(lambda size: ThreadFabric(size, lambda: LoopbackFabric(size).transport))

    Args:
        make_fabric: from a number of ranks to something that runs a program on them; see :class:`ThreadFabric` and
            :class:`PoolFabric`, which do for most transports.
        checks: which promises; all of ``TRANSPORT_CHECKS`` by default.
        deadline: seconds for each.

    Raises:
        TransportCheckError: the first promise that is not kept, with how every rank ended.
    """
    for check in TRANSPORT_CHECKS if checks is None else checks:
        outcomes = make_fabric(check.size).run(check.program, deadline=deadline)
        wrong = [outcome for outcome in outcomes if outcome.ok is (outcome.rank == check.dies)]
        if wrong:
            report = "\n\n".join(outcome.describe() for outcome in outcomes)
            promise = inspect.getdoc(check.program) or "no word of what it promises"
            raise TransportCheckError(f"check {check.name!r} failed on rank {wrong[0].rank}: {promise}\n\n{report}")
