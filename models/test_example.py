"""examples/train_text.py trains models of transformers, cut by `split`, and checks itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "train_text.py"
SMALL = ["--steps", "6", "--layers", "6", "--width", "32", "--batch", "8", "--seq-len", "16", "--microbatches", "3"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, "--stages", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    ("model", "schedule", "launcher"), [("gpt2", "zbv", "loopback"), ("LlamaForCausalLM", "1f1b", "gloo")]
)
def test_it_trains_and_checks_itself(model: str, schedule: str, launcher: str) -> None:
    result = run("--model", f"transformers:{model}", "--schedule", schedule, "--launcher", launcher)
    assert result.returncode == 0, result.stdout + result.stderr
    flat = " ".join(result.stdout.split())
    assert re.search(r"check against one process over 6 steps: .*: ok", flat), result.stdout
    losses = re.search(r"loss ([\d.]+) in the first step, ([\d.]+) in the last", flat)
    assert losses is not None
    assert float(losses[2]) < float(losses[1]) - 0.3


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nonsense", "has no causal model 'nonsense': give a kind, such as gpt2 or llama"),
        ("BertModel", "BertModel does not predict the next token: use --model transformers:BertLMHeadModel"),
    ],
)
def test_a_model_that_is_none_gets_a_sentence_and_exit_code_2(model: str, words: str) -> None:
    result = run("--model", f"transformers:{model}")
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
