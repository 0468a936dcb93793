"""Ranks as threads, for what does not depend on the backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepwell_p2p import LoopbackFabric, Rules, Transport
from stepwell_p2p.exceptions import PeerFailure

torch.set_num_threads(1)  # ranks are threads, and would each have threads of their own: many times slower on few cores


def run_on_threads(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    rules: Rules | None = None,
    timeout: float = 20.0,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(transport, *args)`` on every rank; the results, or the first error that is not another rank's."""
    fabric = LoopbackFabric(size, rules=rules, timeout=timeout)
    transports = [fabric.transport(rank) for rank in range(size)]
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int, transport: Transport) -> None:
        try:
            results[rank] = function(transport, *args, **kwargs)
        except BaseException as error:
            errors[rank] = error
            transport.abort(repr(error))

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(transports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 5)
        assert not thread.is_alive(), "a rank hangs"
    raised = [error for error in errors if error is not None]
    for error in sorted(raised, key=lambda error: isinstance(error, PeerFailure)):
        raise error
    return results


@pytest.fixture
def threads() -> Callable[..., list[Any]]:
    """``threads(function, 4, …)`` runs ``function(transport, …)`` on four ranks that are threads."""
    return run_on_threads
