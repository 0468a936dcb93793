from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepwell_mesh import default_device_type, require_device_type
from stepwell_mesh.exceptions import DeviceTypeError
from stepwell_meta.testing import WorkerPool

# What torch-npu does when it is imported, as far as can be had without an NPU.
FAKE_TORCH_NPU = """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("torch.npu")
npu.is_available = lambda: True
npu.device_count = lambda: 1
torch._register_device_module("npu", npu)

def load():
    pass
"""


def in_process_of_its_own(code: str, path: str) -> list[str]:
    """Lines that the code prints in a process that has torch, and ``path`` in front of sys.path."""

    def run() -> list[str]:
        lines: list[str] = []
        sys.path.insert(0, path)
        exec(code, {"print": lambda *values: lines.append(" ".join(map(str, values)))})
        return lines

    with WorkerPool(max_size=1) as pool:  # not the session's: what is done to torch there cannot be undone
        return pool.run(run, 1, init_group=False)[0]


def in_fresh_interpreter(code: str, *, path: Path) -> list[str]:
    """Lines that the code prints in a new Python, with ``path`` in front of sys.path; seconds, for torch is imported anew."""
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH")))),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def fake_torch_npu(folder: Path, *, entry_point: bool = False) -> Path:
    (folder / "torch_npu.py").write_text(FAKE_TORCH_NPU)
    if entry_point:
        info = folder / "torch_npu-2.13.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:load\n")
    return folder


class Accelerator:
    """Stands in for torch.accelerator on a machine with the given accelerator."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind

    def current_accelerator(self, check_available: bool) -> object:
        assert check_available  # a device type that torch was built for is of no use without a device
        return None if self.kind is None else type("Device", (), {"type": self.kind})()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ("npu", "npu"),
        ("cuda", "cuda"),
        ("xpu", "xpu"),
        (None, "cpu"),
        ("mps", "cpu"),
        ("hpu", "cpu"),
    ],
)
def test_b04_the_default_is_the_accelerator_that_torch_sees(monkeypatch, seen, expected) -> None:
    monkeypatch.setattr(torch, "accelerator", Accelerator(seen))
    assert default_device_type() == expected


def test_the_default_on_this_machine_is_a_device_that_is_there() -> None:
    assert require_device_type(default_device_type()) == default_device_type()
    assert default_device_type() != "cpu" or not torch.cuda.is_available()


def test_a_device_type_that_is_there_is_taken() -> None:
    assert require_device_type("cpu") == "cpu"


@pytest.mark.parametrize("wrong", ["cuda:0", "", "cpu ", 0, None, torch.device("cpu")])
def test_a_device_type_is_a_bare_name(wrong) -> None:
    with pytest.raises(DeviceTypeError) as caught:
        require_device_type(wrong)
    assert str(caught.value) == f'expected a device type such as "cpu" or "cuda", without an index, got {wrong!r}'
    assert caught.value.device_type == wrong


def test_an_unknown_device_type_names_the_choices() -> None:
    with pytest.raises(DeviceTypeError) as caught:
        require_device_type("tpu")
    assert str(caught.value) == (
        "torch knows no device type 'tpu'; choose cpu, npu, cuda, xpu, or import the package that brings it first"
    )


@pytest.mark.parametrize("absent", ["xpu", "meta", "mtia"])
def test_a_device_that_is_not_there_is_refused_not_replaced(absent) -> None:
    if absent == "xpu" and torch.xpu.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(DeviceTypeError) as caught:
        require_device_type(absent)
    assert str(caught.value) == (
        f"device type '{absent}' was asked for, but torch sees no such device here; pass"
        f" '{default_device_type()}', or leave it out to take that"
    )


USE_ALL_BUT_NPU = """
import sys, stepwell_mesh as m
import stepwell_mesh.testing, stepwell_mesh.exceptions
print(m.default_device_type())
m.require_device_type("cpu")
try:
    m.topology_for_world("fsdp")
except m.exceptions.TopologyError:
    pass
print("torch_npu" in sys.modules)
"""


ASK_FOR_NPU = """
print(m.require_device_type("npu"), "torch_npu" in sys.modules, m.default_device_type())
sys.modules["torch_npu"].npu.is_available = lambda: False
try:
    m.require_device_type("npu")
except m.exceptions.DeviceTypeError as error:
    print(error)
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator the default is not cpu")
def test_torch_npu_is_never_imported_unless_asked_for(tmp_path) -> None:
    lines = in_process_of_its_own(USE_ALL_BUT_NPU + ASK_FOR_NPU, str(fake_torch_npu(tmp_path)))
    assert lines == [
        "cpu",
        "False",
        "npu True npu",
        "device type 'npu' was asked for, but torch sees no such device here; pass 'cpu', or leave it out to take that",
    ]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator the default is not cpu")
def test_torch_itself_loads_an_installed_torch_npu(tmp_path) -> None:
    """The fact that the README tells: with an entry point, ``import torch`` imports it, and the default follows."""
    assert in_fresh_interpreter(USE_ALL_BUT_NPU, path=fake_torch_npu(tmp_path, entry_point=True)) == ["npu", "True"]


@pytest.mark.skipif(hasattr(torch, "npu"), reason="torch-npu is installed here")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "No module named 'torch_npu'"),
        ("raise OSError('libhccl.so: cannot open shared object file')", "libhccl.so: cannot open shared object file"),
    ],
)
def test_asking_for_an_npu_without_its_package_says_what_to_install(tmp_path, monkeypatch, source, reason) -> None:
    if source is not None:
        (tmp_path / "torch_npu.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceTypeError) as caught:
        require_device_type("npu")
    assert str(caught.value) == (
        "device type 'npu' needs torch-npu (pip install 'stepwell[npu]') and Ascend's CANN libraries; importing torch_npu"
        f" failed: {reason}"
    )
    assert caught.value.device_type == "npu"
