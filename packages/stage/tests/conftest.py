"""Ranks as threads, for what does not depend on the backend.

Also makes ``support.py`` importable as ``stage_support``, and ``split_support.py`` by its name, here and (by value) in the ranks
of the worker pool.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from stepwell_p2p import LoopbackFabric, Rules, Transport
from stepwell_p2p.exceptions import PeerFailure

torch.set_num_threads(1)  # ranks are threads, and would each have threads of their own: many times slower on few cores


for name, file in (("stage_support", "support.py"), ("split_support", "split_support.py")):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        cloudpickle.register_pickle_by_value(module)


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
