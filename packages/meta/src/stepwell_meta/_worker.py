"""What runs inside one process of a :class:`stepwell_meta.testing.WorkerPool`.

A worker serves one call at a time. A call comes with a function, its rank and its world size; the worker makes a gloo
default process group of exactly that size, calls the function, destroys the group and answers. The group lives as long as
the call, and what DTensor operators remember of meshes goes with it, so a test can neither see nor spoil the groups of another.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import attrs

from stepwell_meta._compat import forget_meshes


@attrs.frozen
class Call:
    """One function call for one rank. ``payload`` is the pickled ``(function, args, kwargs)``."""

    number: int
    rank: int
    world_size: int
    init_group: bool
    timeout: float  # seconds that the process group waits for a peer
    payload: bytes


@attrs.frozen
class Answer:
    """What a call came to: ``payload`` (pickled result) where ``error`` is None, else the error's class name and trace."""

    payload: bytes = b""
    error: str | None = None
    trace: str = ""


def serve(connection: Connection, store_port: int, stack_path: str) -> None:
    """Answer calls until the connection closes. Dumps every thread's stack to ``stack_path`` on SIGUSR1."""
    import cloudpickle
    import torch
    import torch.distributed as dist

    if sys.platform == "linux":  # gloo otherwise asks for the host's public name, which need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # faulthandler writes from the signal handler itself, so it also works while the main thread sits in a C++ wait.
    stack_file = open(stack_path, "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True, chain=False)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=30))
    gc.freeze()  # modules stay; tests that collect garbage need not look at a million of their objects each time

    while True:
        try:
            call: Call = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        connection.send(_run(call, store, cloudpickle, dist))


def _run(call: Call, store: Any, cloudpickle: Any, dist: Any) -> Answer:
    try:
        function, args, kwargs = cloudpickle.loads(call.payload)
        if call.init_group:
            group_store = dist.PrefixStore(f"call-{call.number}", store)
            dist.init_process_group(
                "gloo",
                store=group_store,
                rank=call.rank,
                world_size=call.world_size,
                timeout=timedelta(seconds=call.timeout),
            )
            # Nobody begins, and so nobody ends and closes its sockets, before all are connected.
            if group_store.add("connected", 1) == call.world_size:
                group_store.set("begin", "")
            group_store.wait(["begin"], timedelta(seconds=call.timeout))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = function(*args, **kwargs)
        return Answer(payload=cloudpickle.dumps(result))
    except BaseException as error:  # a test may raise anything, SystemExit too: all of it goes to the caller
        return Answer(error=type(error).__name__, trace=traceback.format_exc())
    finally:
        # In a failed call this also closes the sockets, which is what wakes the peers that still wait for this rank.
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        gc.collect()  # what this call leaves behind is no later one's to find
        gc.freeze()
