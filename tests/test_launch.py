"""One script as threads, under torchrun, and alone; and what happens when a rank fails."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stepwell
from stepwell.exceptions import LaunchError
from stepwell_mesh.exceptions import DeviceTypeError
from stepwell_meta import TensorMeta
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, Edge, Op, OpKind, Recv
from stepwell_p2p.exceptions import PeerFailure, TransportError

SCRIPT = """
import sys

import torch
from torch import nn

import stepwell

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
x, y = torch.randn(12, 8), torch.randn(12, 8)


def main(world):
    pipe = stepwell.pipeline(layers, world, loss_fn=nn.functional.mse_loss, microbatches=5)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        result = pipe.step(x, target=y)
        optimizer.step()
    gathered = stepwell.gather(world.transport, dict(pipe.named_parameters()), to=world.size - 1)
    if gathered is not None:
        torch.save((result.loss, {k: v for part in gathered for k, v in part.items()}), sys.argv[1])
    return result.loss


losses = stepwell.launch(main, ranks=int(sys.argv[2]) if len(sys.argv) > 2 else None)
assert len(set(losses)) == 1, losses
"""


def run_here(script: Path, *arguments: str) -> None:
    """As ``python script arguments`` would, in this process: torch is imported already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")


def test_one_script_runs_unchanged_as_threads_under_torchrun_and_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    threads = torch.get_num_threads()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*torchrun, str(script), str(tmp_path / "torchrun")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        run_here(script, str(tmp_path / "threads"), "4")
        run_here(script, str(tmp_path / "alone"))
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, output
    loss, weights = torch.load(tmp_path / "alone")
    for name in ("threads", "torchrun"):
        other_loss, other = torch.load(tmp_path / name)
        assert other_loss == loss
        assert other.keys() == weights.keys()
        assert all(torch.equal(other[key], weights[key]) for key in weights), name
    assert torch.get_num_threads() == threads


def test_results_come_in_order_of_ranks() -> None:
    assert stepwell.launch(lambda world: (world.rank, world.size, world.device.type), ranks=3) == [
        (rank, 3, torch.device("cpu").type) for rank in range(3)
    ]


def test_one_rank_runs_in_the_calling_thread() -> None:
    assert stepwell.launch(lambda world: threading.current_thread()) == [threading.current_thread()]


def test_each_rank_computes_with_its_share_of_threads_and_they_are_given_back() -> None:
    before = torch.get_num_threads()
    assert stepwell.launch(lambda world: torch.get_num_threads(), ranks=2) == [max(1, before // 2)] * 2
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("ranks", [0, -1, 2.5, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: int) -> None:
    with pytest.raises(LaunchError, match=f"a whole number, at least 1, got {ranks!r}"):
        stepwell.launch(lambda world: None, ranks=ranks)


@pytest.mark.parametrize(
    ("device", "words"), [("meta", "torch sees no such device here"), ("cpu:0", "without an index")]
)
def test_a_device_that_is_not_there_is_refused(device: str, words: str) -> None:
    """The number of ranks was divided by the number of such devices: ZeroDivisionError."""
    with pytest.raises(DeviceTypeError, match=words):
        stepwell.launch(lambda world: None, ranks=2, device=device)


def run_as_torchrun_would(script: str) -> None:
    """In one of four processes, with the variables that torchrun sets."""
    with pytest.MonkeyPatch.context() as patch:
        names = {"RANK": dist.get_rank(), "WORLD_SIZE": 4, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
        for name, value in names.items():
            patch.setenv(name, str(value))
        runpy.run_path(script)


def test_the_readme_runs_under_torchrun_too(workers: WorkerPool, tmp_path: Path) -> None:
    """It says that it does, but its last lines looked for the gradients of all stages in every process."""
    page = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(code)
    workers.run(run_as_torchrun_would, 4, str(script), deadline=60.0)


def test_under_torchrun_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="wants 4 ranks, but torchrun started 2: use --nproc-per-node 4"):
        stepwell.launch(lambda world: None, ranks=4)


def no_transport_to_be_had() -> bool:
    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setenv(name, value)
        patch.setattr("stepwell._launch.C10dTransport", lambda device: 1 / 0)
        free.close()
        with pytest.raises(ZeroDivisionError):
            stepwell.launch(lambda world: None, device="cpu")
    return dist.is_initialized()


def test_a_process_group_is_given_back_when_no_transport_can_be_made(workers: WorkerPool) -> None:
    """It stayed, and a second launch in the process, which would take it for the caller's, never gave it back."""
    assert workers.run(no_transport_to_be_had, 1, init_group=False) == [False]


def policies_of_new_threads() -> list[int]:
    before = set(os.listdir("/proc/self/task"))

    def look(_: stepwell.World) -> list[int]:
        return [os.sched_getscheduler(int(thread)) for thread in set(os.listdir("/proc/self/task")) - before]

    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setenv(name, value)
        free.close()
        (found,) = stepwell.launch(look, device="cpu")
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has such a policy")
def test_threads_of_the_process_group_give_way(workers: WorkerPool) -> None:
    (found,) = workers.run(policies_of_new_threads, 1, init_group=False)
    assert os.SCHED_BATCH in found


def receive_for_ever(world: stepwell.World) -> None:
    op = Op(OpKind.RECV_F, Edge(0, world.rank), 0, 0)
    world.transport.post([Recv(op, TensorMeta((1,), (1,), torch.float32))]).wait()


def test_a_rank_that_raises_outside_a_step_wakes_the_others() -> None:
    def main(world: stepwell.World) -> None:
        if world.rank == 0:
            raise RuntimeError("no data on rank 0")
        receive_for_ever(world)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="no data on rank 0"):
        stepwell.launch(main, ranks=3)
    assert time.monotonic() - start < 5


def test_a_rank_that_does_not_end_after_another_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def sleeps_in_user_code() -> None:
        release.wait(60)

    def main(world: stepwell.World) -> None:
        if world.rank == 0:
            raise RuntimeError("the first error")
        sleeps_in_user_code()

    monkeypatch.setattr("stepwell._launch._PATIENCE", 0.5)
    with pytest.raises(
        LaunchError, match=r"(?s)the first error.*did not bring rank 1 to an end.*sleeps_in_user_code"
    ) as caught:
        stepwell.launch(main, ranks=2)
    release.set()
    # It was waited for twice, and the second error had the first one in it.
    assert str(caught.value).count("to an end") == 1
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_when_a_thread_cannot_be_started_those_that_run_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that were started waited for the one that was not, and the process could not end."""
    start, ended = threading.Thread.start, threading.Event()

    def starts_rank_0_only(thread: threading.Thread) -> None:
        if thread.name != "rank 0":
            raise RuntimeError("can't start new thread")
        start(thread)

    def main(world: stepwell.World) -> None:
        try:
            op = Op(OpKind.RECV_F, Edge(1, 0), 0, 0)
            world.transport.post([Recv(op, TensorMeta((1,), (1,), torch.float32))]).wait()
        except PeerFailure:
            ended.set()
            raise

    monkeypatch.setattr(threading.Thread, "start", starts_rank_0_only)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        stepwell.launch(main, ranks=2)
    assert ended.is_set()


# A process that dies.


def train_until_killed(victim: int) -> str:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    transport = C10dTransport()
    world = stepwell.World(transport.rank, transport.size, torch.device("cpu"), transport)

    class Dies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = layers[victim], 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 9 and transport.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return self.linear(x)

    pieces: list[nn.Module] = [Dies() if rank == victim else layer for rank, layer in enumerate(layers)]
    pipe = stepwell.pipeline(pieces, world, loss_fn=nn.functional.mse_loss, microbatches=6)
    try:
        for _ in range(3):
            pipe.step(torch.ones(6, 4), target=torch.zeros(6, 4))
    except (PeerFailure, TransportError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


@pytest.mark.parametrize("victim", [0, 2, 3])
def test_a_killed_process_ends_every_rank_within_seconds(workers: WorkerPool, victim: int) -> None:
    outcomes = workers.outcomes(train_until_killed, 4, victim, deadline=60)
    died = outcomes[victim]
    assert died.exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.ok, outcome.describe()
            assert outcome.value.startswith(("PeerFailure", "TransportError")), outcome.value
            assert outcome.seconds - died.seconds < 10
