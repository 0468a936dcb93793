"""The example that the README's first command runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "train_text.py"
SMALL = ["--steps", "12", "--layers", "3", "--width", "32", "--batch", "8", "--seq-len", "16", "--microbatches", "3"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("launcher", "schedule"), [("loopback", "zbv"), ("gloo", "1f1b"), ("shm", "1f1b")])
def test_it_trains_and_checks_itself(launcher: str, schedule: str, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 50)
    result = run(*SMALL, "--layers", "6", "--launcher", launcher, "--schedule", schedule, "--text", str(text))
    assert result.returncode == 0, result.stdout + result.stderr
    flat = " ".join(result.stdout.split())
    assert re.search(r"largest difference in loss 0, in gradients 0 .*: ok", flat), result.stdout
    assert result.stdout.count("rank 3 |") == 2  # measured and predicted
    assert "sample: The " in flat
    first, last = map(float, re.search(r"loss ([\d.]+) in the first step, ([\d.]+) in the last", flat).groups())  # type: ignore[union-attr]
    assert last < first - 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "0"], "--stages must be at least 1, got 0"),
        (["--stages", "12"], "--stages 12 with --schedule 1f1b needs 12 pieces, but 6 layers"),
        (["--schedule", "fifo"], "--schedule must be one of gpipe, 1f1b"),
        (["--batch", "4"], "--batch 4 cannot be cut into 8 microbatches"),
        (["--width", "30"], "--width 30 must be a multiple of --heads 4"),
        (["--device", "abacus"], "--device abacus is not here; this machine has cpu"),
        (["--text", "nowhere.txt"], "--text nowhere.txt cannot be read: No such file"),
        (["--text", str(SCRIPT), "--seq-len", "1000000"], "too few for --seq-len 1000000"),
        (["--launcher", "smoke"], "invalid choice: 'smoke'"),
    ],
)
def test_wrong_options_get_a_sentence_and_exit_code_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("train_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["train_text.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        module.main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
