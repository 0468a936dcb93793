"""The command line, as a user calls it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepwell._cli as cli
from stepwell._cli import main
from stepwell_stage import lower
from stepwell_stage.schedules import custom, dualpipe_v, interleaved_1f1b, one_f_one_b, to_csv

COSTS = {
    "layers": [
        {"forward": 2e-4, "backward": 3e-4, "parameter_bytes": 1000},
        {"count": 6, "forward": 1e-3, "backward": 2e-3, "activation_bytes": 100, "output_bytes": 10},
    ],
    "latency": 1e-5,
    "bandwidth": 1e9,
}


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS))
    return file


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def as_text(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    pytest.importorskip("rich")
    assert main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def test_plan(capsys: pytest.CaptureFixture[str], costs: Path, tmp_path: Path) -> None:
    csv, svg = tmp_path / "best.csv", tmp_path / "best.svg"
    size = ["--ranks", 2, "--batch", 4, "--memory", "4KB", "--schedules", "1f1b,gpipe", "--csv", csv, "--picture", svg]
    found = as_json(capsys, "plan", costs, *size)
    assert found["ok"]
    assert [choice["schedule"] for choice in found["choices"]] == ["1f1b", "gpipe"]
    assert found["choices"][0]["cuts"] == [0, 4]
    assert svg.read_text().startswith("<svg")
    assert as_json(capsys, "prove", csv)["num_ranks"] == 2
    text = as_text(capsys, "plan", costs, *size)
    assert "Plans for 7 layers on 2 ranks, 4 samples a step" in text
    assert "1f1b, simulated: " in text
    assert "rank 1 |" in text


def test_plan_that_does_not_fit(capsys: pytest.CaptureFixture[str], costs: Path) -> None:
    found = as_json(capsys, "plan", costs, "--ranks", 2, "--batch", 4, "--memory", 100, "--schedules", "1f1b", code=1)
    assert not found["ok"]
    assert found["kind"] == "ScheduleError"
    assert "nothing fits into 100 bytes a rank" in found["error"]


WRONG_COSTS = [
    "",
    "[]",
    "{}",
    "[" * 100_000,
    '{"layers": [1]}',
    '{"layers": [{"forwards": 1}]}',
    '{"layers": [], "speed": 1}',
    '{"layers": [], "latency": "low"}',
    '{"layers": [{"forward": 1, "backward": 1}], "unshard": [1]}',  # was taken, and had no effect
    '{"layers": [{"forward": "1", "backward": 1}]}',
    '{"layers": [{"forward": 1, "backward": 1, "parameter_bytes": -5}]}',
    *(f'{{"layers": [{{"forward": 1, "backward": 1, "count": {n}}}]}}' for n in (-1, 0, 1.5, 10**9, '"2"', "[]")),
]


@pytest.mark.parametrize("content", WRONG_COSTS)
def test_plan_with_a_wrong_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    (tmp_path / "costs.json").write_text(content)
    found = as_json(capsys, "plan", tmp_path / "costs.json", "--ranks", 1, "--batch", 1, code=1)
    assert "is no file of costs" in found["error"]


def test_prove(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    to_csv(one_f_one_b(4, 8), tmp_path / "1f1b.csv")
    proof = as_json(capsys, "prove", tmp_path / "1f1b.csv")
    assert proof["peak_activations"] == [4, 3, 2, 1]
    assert proof["rules"] == {"tagged": False, "rendezvous": True}
    text = as_text(capsys, "prove", tmp_path / "1f1b.csv", "--tagged", "--buffered")
    assert "1f1b is proved for tagged messages, buffered sends" in text.replace("\n", " ").replace("  ", " ")


def test_prove_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    to_csv(interleaved_1f1b(4, 8), tmp_path / "looped.csv")
    found = as_json(capsys, "prove", tmp_path / "looped.csv", "--channels", "shared", code=1)
    assert found["kind"] == "DeadlockError"
    assert "The same order is safe with 'per-edge' channels" in found["error"]
    (tmp_path / "bad.csv").write_text("0F0,0X0\n")
    assert "bad.csv, line 1, cell 2" in as_json(capsys, "prove", tmp_path / "bad.csv", code=1)["error"]
    missing = as_json(capsys, "prove", tmp_path / "none.csv", code=1)
    assert (missing["kind"], missing["error"]) == (
        "FileNotFoundError",
        f"{tmp_path / 'none.csv'}: No such file or directory",
    )
    assert as_json(capsys, "timeline", tmp_path, code=1)["error"] == f"{tmp_path}: Is a directory"


def test_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schedule, plan, trace = tmp_path / "mine.csv", tmp_path / "plan.csv", tmp_path / "trace.json"
    to_csv(custom(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]), schedule)
    to_csv(lower(one_f_one_b(2, 2)), plan)
    shown = as_json(capsys, "timeline", schedule, plan, "--picture", trace)
    assert [timeline["seconds"] for timeline in shown["timelines"]] == [9.0, 9.0]
    again = as_json(capsys, "timeline", trace)
    assert [timeline["name"] for timeline in again["timelines"]] == ["mine, simulated", "plan, simulated"]
    assert again["timelines"][0]["bubble_per_rank"] == pytest.approx([1 / 3, 1 / 3])
    text = as_text(capsys, "timeline", schedule, "--forward", 2, "--backward", 2)
    assert "mine, simulated: 12 s, bubble 33.3%" in text
    assert "F0" in text


def test_a_plan_that_nothing_can_carry_out_has_no_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Plans with a send too many were drawn, and those with a message that is not there ended in a traceback."""
    for added, sentence in (("1SEND_B0", "is sent twice"), ("1WAIT_B5", "there are microbatches 0 to 1")):
        (tmp_path / "plan.csv").write_text(to_csv(lower(one_f_one_b(2, 2))).rstrip() + f",{added}\n")
        assert sentence in as_json(capsys, "timeline", tmp_path / "plan.csv", code=1)["error"]


def test_overlapped_pairs_are_drawn_as_they_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They were drawn as one action, which they are only where a handler makes them one."""
    file = tmp_path / "pairs.csv"
    to_csv(dualpipe_v(4, 8), file)
    apart, as_one, gaining = (
        as_json(capsys, "timeline", file, *options)["timelines"][0]["seconds"]
        for options in ([], ["--overlap-gain", 0], ["--overlap-gain", 0.5])
    )
    assert gaining < apart < as_one
    shown = as_text(capsys, "timeline", file)
    assert "&" not in shown
    assert "&" in as_text(capsys, "timeline", file, "--overlap-gain", 0)
    assert (
        "overlap_gain is a share from 0 to 1" in as_json(capsys, "timeline", file, "--overlap-gain", 7, code=1)["error"]
    )


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--picture", "a.gif"], "a picture is an .svg, .png or .json (Perfetto) file, got a.gif"),
        (["--picture", "nowhere/a.svg"], "there is no folder nowhere"),
        (["--csv", "nowhere/a.csv"], "there is no folder nowhere"),
        (["--csv", "/"], "/ is a folder"),
        (["--picture", "a.png"], ".png is drawn by matplotlib, which is not installed: pip install 'stepwell[plot]'"),
    ],
)
def test_where_results_go_is_checked_before_they_are_worked_out(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    costs: Path,
    option: list[str],
    sentence: str,
) -> None:
    """The search ran to its end, minutes later perhaps, and then its result was lost for the name of a file."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(costs), "--ranks", "2", "--batch", "4", *option])
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_plan_takes_edges_that_differ(capsys: pytest.CaptureFixture[str], costs: Path) -> None:
    """They were refused, since a file cannot hold an EdgeCost."""
    size = ["--ranks", 2, "--batch", 4, "--schedules", "1f1b"]
    quick = as_json(capsys, "plan", costs, *size)["choices"][0]
    costs.write_text(json.dumps(COSTS | {"edges": [{"source": 0, "destination": 1, "latency": 0.5, "bandwidth": 1e9}]}))
    assert as_json(capsys, "plan", costs, *size)["choices"][0]["seconds"] > quick["seconds"] + 0.5
    costs.write_text(json.dumps(COSTS | {"edges": [{"source": 0}]}))
    assert "is no file of costs" in as_json(capsys, "plan", costs, *size, code=1)["error"]


def test_numbers_are_not_cut_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even at 80 columns the seconds of the best plans were cut to the same digits, and an ellipsis."""
    to_csv(one_f_one_b(2, 3), tmp_path / "[bold]a.csv")
    size = ["--ranks", 2, "--batch", 4, "--microbatches", 4, "--schedules", "1f1b,zbv"]
    numbers = [f"{choice['seconds']:.4g} " for choice in as_json(capsys, "plan", costs, *size)["choices"]]
    for columns in (20, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = as_text(capsys, "prove", tmp_path / "[bold]a.csv")
        assert "…" not in shown
        assert "[bold]a is" in shown
        shown = as_text(capsys, "plan", costs, *size)
        assert "…" not in shown
        assert all(number in shown for number in numbers)


def test_headings_are_whole_in_any_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heading longer than its table was cut at the table's edge, whatever the terminal's width: of "each rank at most:", which
    says what the numbers are, "each" was left."""
    to_csv(one_f_one_b(2, 3), tmp_path / "a.csv")
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        words = as_text(capsys, "prove", tmp_path / "a.csv").split("┏")[0].split()
        expected = "a is proved for first in, first out, per-edge channels, rendezvous; each rank at most:"
        assert " ".join(words) == expected


def test_the_heading_of_a_timeline_is_whole_in_any_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut at the terminal's edge: of "bubble 20.0%" at 30 columns "bubb" was left, and nothing of what is below 5."""
    to_csv(one_f_one_b(2, 4), tmp_path / "a-schedule.csv")
    for columns in (5, 30, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        heading, *lanes = as_text(capsys, "timeline", tmp_path / "a-schedule.csv").splitlines()
        assert heading == "a-schedule, simulated: 15 s, bubble 20.0%"
        assert [len(lane) for lane in lanes] == [max(columns, 20)] * 2


def test_actions_have_their_colours_in_a_terminal_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.csv"
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    to_csv(custom(["0F0 0{save-it}0 0F1 0I0 0I1 0W0 0W1"]), file)
    plain = as_text(capsys, "timeline", file)
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    shown = as_text(capsys, "timeline", file)
    found = re.findall(r"\x1b\[3[07];48;2;(\d+;\d+;\d+)m([^\x1b]+)\x1b", shown)
    assert [text.rstrip("-") for _, text in found] == [
        "F0",
        "F1",
        "I0",
        "I1",
        "W0",
        "W1",
    ]  # what takes no time is no box
    assert len({colour for colour, _ in found}) == 3
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == plain
    to_csv(dualpipe_v(2, 6), file)
    shown = as_text(capsys, "timeline", file, "--overlap-gain", "0.1")
    assert "m&--" in shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;" not in as_text(capsys, "timeline", file)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`stepwell … --json | head` ended in a BrokenPipeError's traceback, a full disk in an OSError's."""
    to_csv(one_f_one_b(2, 2), tmp_path / "a.csv")
    command = [sys.executable, "-m", "stepwell", "prove", str(tmp_path / "a.csv"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert (started.stderr.read(), started.wait(60)) == (b"", 1)
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.stderr.count("\n"), done.returncode) == (1, 1)
        assert done.stderr.startswith("stepwell: ")


def test_a_trace_in_which_nothing_was_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It was shown as nothing at all."""
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    found = as_json(capsys, "timeline", tmp_path / "empty.json", code=1)
    assert found["error"] == f"{tmp_path / 'empty.json'} is a trace without a timeline: nothing was done in it"


def test_whoever_has_had_enough_gets_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, costs: Path
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stepwell._cli_plan.plan_search", stopped)
    assert main(["plan", str(costs), "--ranks", "1", "--batch", "1", "--json"]) == 130
    assert capsys.readouterr().err == "stepwell: interrupted\n"


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "doctor")
    assert found["transports"]["loopback"] == "works"
    assert found["transports"]["gloo"] in ("works", "not built into torch")
    assert found["versions"]["torch"]
    assert found["ok"]


def test_doctor_says_what_failed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr("stepwell._cli_doctor._two_processes", broken)
    found = as_json(capsys, "doctor", code=1)
    assert found["transports"]["gloo"] == "failed: RuntimeError: no route to host"
    assert not found["ok"]


def test_without_rich_a_sentence_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    to_csv(one_f_one_b(2, 2), tmp_path / "a.csv")
    assert cli.main(["prove", str(tmp_path / "a.csv")]) == 2
    assert "pip install 'stepwell[cli]', or use --json" in capsys.readouterr().err
    assert as_json(capsys, "prove", tmp_path / "a.csv")["ok"]


@pytest.mark.parametrize(("text", "size"), [("40GiB", 40 * 2**30), ("8e9", 8 * 10**9), ("2.5 MB", 2_500_000), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    from stepwell._cli_plan import _size

    assert _size(text) == size


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["plan", "x.json"],
        *(["plan", "x", "--ranks", "2", "--batch", "2", "--memory", size] for size in ("big", "inf", "-1")),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_python_m_stepwell(tmp_path: Path) -> None:
    to_csv(one_f_one_b(2, 2), tmp_path / "a.csv")
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", "prove", str(tmp_path / "a.csv"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["schedule"] == "a"
