"""The example that the README's first command runs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from stepwell_meta.testing import WorkerPool
from stepwell_stage.schedules import BY_NAME

SCRIPT = Path(__file__).parent.parent / "examples" / "train_text.py"
SMALL = ["--steps", "12", "--layers", "6", "--width", "32", "--batch", "8", "--seq-len", "16", "--microbatches", "3"]


def load(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location("train_text", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(script: Path, arguments: list[str]) -> tuple[object, str]:
    """Exit code and output of the script, in this process, which has torch loaded already."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(sys, "argv", [str(script), *arguments])
        with pytest.raises(SystemExit) as exit_:
            load(script).main()
    return exit_.value.code, output.getvalue()


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    text = tmp_path / "own.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 50)
    return [*SMALL, "--text", str(text)]


def check(output: str, last: int) -> None:
    flat = " ".join(output.split())
    assert re.search(r"largest difference in loss 0, in gradients 0 .*: ok", flat), output
    assert output.count(f"rank {last} |") == 2  # measured and predicted
    assert "sample: The " in flat
    first, final = map(float, re.search(r"loss ([\d.]+) in the first step, ([\d.]+) in the last", flat).groups())  # type: ignore[union-attr]
    assert final < first - 1


def test_it_trains_on_threads_and_checks_itself(arguments: list[str]) -> None:
    code, output = run_here(SCRIPT, [*arguments, "--schedule", "zbv"])
    assert code == 0
    check(output, 3)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"zbv"}))
def test_any_schedule_is_trained_predicted_and_drawn(name: str) -> None:
    """On three ranks, with five microbatches of a batch of eight and six layers in three or six stages."""
    sizes = ["--steps", "2", "--layers", "4", "--width", "16", "--batch", "8", "--seq-len", "8", "--microbatches", "5"]
    code, output = run_here(SCRIPT, [*sizes, "--stages", "3", "--schedule", name])
    assert code == 0
    assert re.search(r"check against one process over 2 steps: .*\): ok", " ".join(output.split())), output
    for title in (f"last step, as measured:\n{name}: ", f"as predicted from its actions:\n{name}, simulated: "):
        lines = output.split(title)[1].splitlines()
        assert re.match(r"[\d.]+ m?s, bubble [\d.]+%", lines[0])
        assert [line.split("|")[0] for line in lines[1:4]] == ["rank 0 ", "rank 1 ", "rank 2 "]


def test_a_model_that_has_learnt_nothing_sends_no_control_codes_to_the_terminal() -> None:
    """Its sample was of any bytes, and went to the terminal as they were, those that begin escape sequences too."""
    sizes = ["--steps", "1", "--layers", "1", "--width", "8", "--batch", "2", "--seq-len", "8", "--microbatches", "2"]
    code, output = run_here(SCRIPT, [*sizes, "--stages", "1", "--no-check"])
    assert code == 0
    assert "\ufffd" in output
    assert all(character.isprintable() for line in output.split("\n") for character in line)


def test_it_starts_processes_and_trains_on_gloo(arguments: list[str]) -> None:
    """As a user starts it; two processes say as much about that as four."""
    command = [sys.executable, str(SCRIPT), *arguments, "--launcher", "gloo", "--stages", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    check(result.stdout, 1)


def as_torchrun_would(script: Path, arguments: list[str], run: str) -> tuple[object, str]:
    """In one of four processes: with the variables that torchrun sets, and a transport that no layer knows of."""
    with pytest.MonkeyPatch.context() as patch:
        names = {"RANK": dist.get_rank(), "WORLD_SIZE": 4, "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": run}
        for name, value in names.items():
            patch.setenv(name, str(value))
        patch.setattr(sys, "path", [*sys.path])  # the script adds the transport's folder
        return run_here(script, [*arguments, "--launcher", "shm"])


def test_it_trains_over_shared_memory(arguments: list[str], workers: WorkerPool, tmp_path: Path) -> None:
    results = workers.run(as_torchrun_would, 4, SCRIPT, arguments, tmp_path.parent.name + tmp_path.name, deadline=100.0)
    assert [code for code, _ in results] == [0] * 4
    check(results[3][1], 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "0"], "--stages must be at least 1, got 0"),
        (["--lr", "nan"], "--lr must be a number, at least 0 and finite, got nan"),
        (["--stages", "12"], "--stages 12 with --schedule 1f1b needs 12 pieces, but 6 layers"),
        (["--schedule", "fifo"], "--schedule must be one of gpipe, 1f1b"),
        (["--batch", "4"], "--batch 4 cannot be cut into 8 microbatches"),
        (["--width", "30"], "--width 30 must be a multiple of --heads 4"),
        (["--device", "abacus"], "--device abacus is not here; this machine has cpu"),
        (["--text", "nowhere.txt"], "--text nowhere.txt cannot be read: No such file"),
        (["--text", str(SCRIPT), "--seq-len", "1000000"], "too few for --seq-len 1000000"),
        (["--launcher", "smoke"], "invalid choice: 'smoke'"),
        (["--model", "gpt3"], "--model must be gpt or transformers:NAME, got 'gpt3'"),
        (["--model", "transformers:gpt2"], "transformers is not installed: python -m pip install transformers"),
    ],
)
def test_wrong_options_get_a_sentence_and_exit_code_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_text.py", *arguments])
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    with pytest.raises(SystemExit) as exit_:
        load(SCRIPT).main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
