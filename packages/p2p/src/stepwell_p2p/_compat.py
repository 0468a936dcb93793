"""Every private torch name that this layer uses, with the versions it was seen in and what happens without it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ._scheduling import giving_way

_DEFAULT_TIMEOUT = timedelta(minutes=30)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long operations of a group wait for a peer.

    ``ProcessGroup._get_backend`` and the backend's ``options._timeout`` were seen in 2.13. Without them the answer is
    c10d's default, 30 minutes.
    """
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT


def own_connection(store: dist.Store) -> dist.Store:
    """The same store over a connection of its own, so that a thread is not held up by others' long waits.

    ``Store.clone`` was seen in 2.13, but not in the stubs. Without it the connection is shared.
    """
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def memory_users(tensor: torch.Tensor) -> int | None:
    """How many tensors, also those that autograd saved, use a tensor's memory; None where that cannot be known.

    ``torch._C._storage_Use_Count`` was seen in 2.13. Without it memory is never used a second time.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    handle = tensor.untyped_storage()  # is itself a user
    return int(count(handle._cdata)) - 1


def end_wait(work: dist.Work) -> None:
    """End another thread's wait for a receive of gloo: it returns, whether or not the message is there.

    ``RecvWork::abort`` does that, which torch has in C++ only. It is called where the table of functions of the object behind
    ``work`` is that of this class, and was seen in 2.13. Without it such a wait goes on until its timeout.
    """
    found = _receive_of_gloo()
    if found is None or type(work) is not dist.Work:
        return
    table, abort = found
    inner = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value  # what pybind keeps first
    if inner and ctypes.c_void_p.from_address(inner).value == table:
        abort(ctypes.c_void_p(inner))


@functools.cache
def _receive_of_gloo() -> tuple[int, Callable[[ctypes.c_void_p], None]] | None:
    """The table of virtual functions of gloo's receives, and how one is ended."""
    name = "N4c10d16ProcessGroupGloo8RecvWork"
    try:
        library = ctypes.CDLL(torch._C.__file__)
        table = ctypes.addressof(ctypes.c_void_p.in_dll(library, f"_ZTV{name}E"))
        abort = getattr(library, f"_Z{name}5abortEv")
    except (AttributeError, OSError, ValueError):
        return None
    abort.restype = None
    return table + 2 * ctypes.sizeof(ctypes.c_void_p), abort  # behind an offset and the type


def gloo_groups(timeout: timedelta) -> Callable[[dist.Store, int, int], dist.ProcessGroupGloo]:
    """A maker of gloo groups, from store, rank and size, that share one event loop.

    A loop for each group would cost a thread and, for a message each way, another switch of threads. ``_Options`` with
    ``_devices`` and ``_threads``, and ``create_default_device``, were seen in 2.13. Without them each group has its own.
    """
    try:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stubs
        with giving_way():  # a device starts its loop
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._threads = 1  # they serve collectives, of which these groups have none
        options._timeout = timeout
    except AttributeError:
        return lambda store, rank, size: dist.ProcessGroupGloo(store, rank, size, timeout)
    return lambda store, rank, size: dist.ProcessGroupGloo(store, rank, size, options)
