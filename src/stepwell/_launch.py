"""Runs one function as every rank: threads of this process, or the processes that torchrun started.

The function is the same in all cases. Which one it is depends on how the script was started, never on the script.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist

from stepwell_mesh import default_device_type, require_device_type
from stepwell_p2p import C10dTransport, LoopbackFabric, Transport, giving_way
from stepwell_p2p.exceptions import PeerFailure

from .exceptions import LaunchError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = 10.0  # seconds that the other ranks get to end after one has failed


@attrs.frozen(eq=False)
class World:
    """What one rank knows of the others.

    Attributes:
        rank: its number, from 0.
        size: how many ranks there are.
        device: where it computes.
        transport: what carries tensors between ranks.
    """

    rank: int
    size: int
    device: torch.device
    transport: Transport


def launch(main: Callable[[World], Any], *, ranks: int | None = None, device: str | None = None) -> list[Any]:
    """Call ``main(world)`` once for every rank.

    Under torchrun this process is one of the ranks, and torch.distributed is initialised if it is not yet. Otherwise the ranks
    are threads of this process: nothing else is started, and one rank runs in the calling thread. Threads share the process's
    random number generator and its modules; build the model before ``launch``, and draw with a ``torch.Generator`` of your own.
    They share its cores too: each computes with its share of the threads. What torch keeps for each thread (``no_grad``,
    ``autocast``, a default device) begins anew in theirs: set it in ``main``.

    Args:
        main: what a rank does.
        ranks: how many ranks; under torchrun they are as many as it started, elsewhere 1 by default.
        device: device type without an index, such as "cpu" or "cuda"; by default the accelerator that torch finds, else the
            CPU. Ranks take its devices in turn.

    Returns:
        What ``main`` returned: of every rank where they are threads, of this process's rank under torchrun.

    Raises:
        LaunchError: the number of ranks does not fit, or after a failure a rank's thread did not end.
        stepwell_mesh.exceptions.DeviceTypeError: there is no such device here.
        Exception: what a rank raised first. The other ranks are told, so that none waits for it.

    Example::

        stepwell.launch(lambda world: world.rank, ranks=3)   # [0, 1, 2]
    """
    kind = default_device_type() if device is None else require_device_type(device)
    if all(name in os.environ for name in _TORCHRUN):
        return [_run_process(main, ranks, kind)]
    count = 1 if ranks is None else ranks
    if not isinstance(count, int) or count < 1:
        raise LaunchError(f"ranks must be a whole number, at least 1, got {count!r}")
    fabric = LoopbackFabric(count)
    worlds = [
        World(rank, count, device, fabric.transport(rank, device=device))
        for rank, device in enumerate(_device(kind, rank) for rank in range(count))
    ]
    if count == 1:
        try:
            return [main(worlds[0])]
        finally:
            worlds[0].transport.close()
    return _run_threads(main, worlds)


def _run_process(main: Callable[[World], Any], ranks: int | None, kind: str) -> Any:
    size = int(os.environ["WORLD_SIZE"])
    if ranks is not None and ranks != size:
        raise LaunchError(f"this script wants {ranks} ranks, but torchrun started {size}: use --nproc-per-node {ranks}")
    device = _device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    ours = not dist.is_initialized()
    if ours:
        with giving_way() if device.type == "cpu" else contextlib.nullcontext():
            dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        transport = C10dTransport(device=device)
        try:
            return main(World(transport.rank, transport.size, device, transport))
        except BaseException as error:
            # Said to the others first: this process may live on, and they must not wait for it.
            transport.abort(_reason(error))
            raise
        finally:
            transport.close()
    finally:
        if ours:
            dist.destroy_process_group()


def _run_threads(main: Callable[[World], Any], worlds: list[World]) -> list[Any]:
    results: list[Any] = [None] * len(worlds)
    errors: dict[int, BaseException] = {}

    def run(world: World) -> None:
        try:
            torch.set_num_threads(share)
            if world.device.type != "cpu":
                torch.accelerator.set_device_index(world.device)  # each thread has its own
            results[world.rank] = main(world)
        except BaseException as error:  # whatever ends a rank must reach the caller, and wake the other ranks
            errors[world.rank] = error
            world.transport.abort(_reason(error))
        finally:
            world.transport.close()

    with _shared_threads(len(worlds)) as share:
        threads = [
            threading.Thread(target=run, args=(world,), name=f"rank {world.rank}", daemon=True) for world in worlds
        ]
        try:
            for thread in threads:
                thread.start()
            _join(threads, errors)
        except LaunchError:  # the ranks were told, and had their time
            raise
        except BaseException as error:
            worlds[0].transport.abort(_reason(error))
            _join(threads, {-1: error})
            raise
    if errors:
        first = next((error for error in errors.values() if not isinstance(error, PeerFailure)), None)
        raise first or next(iter(errors.values()))
    return results


@contextlib.contextmanager
def _shared_threads(ranks: int) -> Iterator[int]:
    """How many threads each rank may compute with. Setting it in one thread changes torch's default for all, so set it back."""
    before = torch.get_num_threads()
    try:
        yield max(1, before // ranks)
    finally:
        torch.set_num_threads(before)


def _join(threads: list[threading.Thread], errors: dict[int, BaseException]) -> None:
    """Wait for all threads; once one has failed, only ``_PATIENCE`` seconds more."""
    give_up = None
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(0.05 if errors else 0.5)
        if errors and give_up is None:
            give_up = time.monotonic() + _PATIENCE
        if give_up is not None and time.monotonic() > give_up:
            frames = sys._current_frames()
            where = "\n".join(
                f"{thread.name} is in:\n" + "".join(traceback.format_stack(frames[thread.ident]))
                for thread in alive
                if thread.ident in frames
            )
            first = next(iter(errors.values()))
            names = ", ".join(thread.name for thread in alive)
            raise LaunchError(
                f"a rank failed ({_reason(first)}), and did not bring {names} to an end within {_PATIENCE:g} s: what the rank"
                f" is in is no wait of stepwell's, and should have a time limit of its own.\n{where}"
            ) from first


def _device(kind: str, index: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, index % torch.get_device_module(kind).device_count())


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
