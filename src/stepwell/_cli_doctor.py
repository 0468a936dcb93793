"""``stepwell doctor``: what there is on this machine, and whether transports work."""

from __future__ import annotations

import functools
import importlib.metadata
import multiprocessing
import platform
import queue
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepwell._cli_report import Report, Table
from stepwell_meta import TensorMeta
from stepwell_p2p import C10dTransport, Edge, LoopbackFabric, Op, OpKind, Placement, Recv, Send, Transport

PACKAGES = (
    "stepwell",
    "stepwell-meta",
    "stepwell-mesh",
    "stepwell-p2p",
    "stepwell-stage",
    "stepwell-graphpasses",
    "torch",
    "torch-npu",
    "rich",
    "matplotlib",
)
DEADLINE = 120.0  # seconds for one transport, the start of its processes included


def doctor() -> Report:
    """Versions, backends, devices, and a message each way between two ranks over every transport there is."""
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    backends = _backends()
    devices = _devices()
    tests = {"loopback": _try(_loopback)}
    for backend, there in backends.items():
        if not there:
            tests[backend] = "not built into torch"
        elif backend != "gloo" and len(devices) < 2:
            tests[backend] = "not tested: needs two devices"
        else:
            tests[backend] = _try(functools.partial(_two_processes, backend))
    failed = [name for name, result in tests.items() if result.startswith("failed")]
    tables = (
        Table(
            "Versions",
            ("package", "version"),
            ((name, found or "not installed") for name, found in versions.items()),
            "left",
        ),
        Table(
            "Devices",
            ("device", "name"),
            devices.items() or [("cpu", platform.processor() or platform.machine())],
            "left",
        ),
        Table("Transports", ("transport", "two ranks, a message each way"), tests.items(), "left"),
    )
    data = {"versions": versions, "backends": backends, "devices": devices, "transports": tests}
    return Report(data, tables, ok=not failed)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> dict[str, bool]:
    if not dist.is_available():
        return {"gloo": False}
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "xccl": dist.is_xccl_available()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "npu":
        found["hccl"] = dist.is_backend_available("hccl")
    return found


def _devices() -> dict[str, str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {}
    module = getattr(torch, accelerator.type, None)
    name = getattr(module, "get_device_name", lambda index: accelerator.type)
    return {f"{accelerator.type}:{index}": name(index) for index in range(torch.accelerator.device_count())}


def _try(test: Callable[[], None]) -> str:
    try:
        test()
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return "works"


def _loopback() -> None:
    fabric = LoopbackFabric(2, timeout=DEADLINE)
    faults: list[Exception] = []

    def run(rank: int) -> None:
        try:
            _exchange(fabric.transport(rank))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    if faults:
        raise faults[0]


def _two_processes(backend: str) -> None:
    # Importing torch takes longer than all else here: where that is possible one process does it, and is then doubled.
    context = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
    )
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        processes = [
            context.Process(target=_rank, args=(rank, backend, str(Path(folder) / "store"), results), daemon=True)
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        try:
            faults = [fault for fault in (results.get(timeout=DEADLINE) for _ in processes) if fault]
        except queue.Empty:
            raise TimeoutError(f"no answer from both ranks within {DEADLINE:g} s") from None
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
    if faults:
        raise RuntimeError(faults[0])


def _rank(rank: int, backend: str, store: str, results: Any) -> None:
    """One rank of the test, in a process of its own."""
    try:
        device = torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        if backend != "gloo" and accelerator is not None:
            device = torch.device(accelerator.type, rank)
            torch.accelerator.set_device_index(rank)
        files = dist.FileStore(store, 2)
        limit = timedelta(seconds=DEADLINE / 2)
        dist.init_process_group(backend, store=files, rank=rank, world_size=2, timeout=limit)
        transport = C10dTransport(placement=Placement.loop(2, 2), device=device)
        _exchange(transport, device)
        transport.close()
        dist.destroy_process_group()
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")
    else:
        results.put("")


def _exchange(transport: Transport, device: torch.device | str = "cpu") -> None:
    """Send a value to the other rank, take one from it, and look at it."""
    here, there = transport.rank, 1 - transport.rank
    value = torch.arange(1024, dtype=torch.float32, device=device) + here
    kinds = (OpKind.SEND_F, OpKind.RECV_B) if here == 0 else (OpKind.SEND_B, OpKind.RECV_F)
    send = Send(Op(kinds[0], Edge(here, there), here, 0), value)
    receive = Recv(Op(kinds[1], Edge(there, here), there, 0), TensorMeta.from_tensor(value))
    (got,) = transport.post([send, receive]).wait()
    if not torch.equal(got.to(value.device), value - here + there):
        raise RuntimeError(f"rank {here} received other values than rank {there} sent")
