"""The command line: ``stepwell plan | prove | timeline | doctor``.

A command turns its arguments into a :class:`Report`; here it is printed, as tables by rich or as JSON by nobody else's help.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from stepwell._cli_doctor import doctor
from stepwell._cli_plan import add_plan, add_prove, add_timeline
from stepwell._cli_report import Report, Table
from stepwell_meta.exceptions import StepwellError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: those of the command line, by default of this process.

    Returns:
        0 if all is well; 1 if a plan is refused, a file is wrong or a check failed; 2 if the arguments make no sense; 130 if
        whoever called it has had enough.
    """
    parser = argparse.ArgumentParser(
        prog="stepwell", description="Plan, prove and look at pipelines; check this machine."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    json_flag = argparse.ArgumentParser(add_help=False)
    json_flag.add_argument("--json", action="store_true", help="print JSON instead of tables")
    for add in (add_plan, add_prove, add_timeline):
        add(commands, json_flag)
    check = commands.add_parser(
        "doctor", parents=[json_flag], help="versions, backends, devices, and a test of each transport"
    )
    check.set_defaults(run=lambda _: doctor())
    options = parser.parse_args(arguments)
    if not options.json and not _has_rich():
        sys.stderr.write(
            "stepwell: tables are drawn by rich, which is not installed: pip install 'stepwell[cli]', or use --json\n"
        )
        return 2
    try:
        report: Report = options.run(options)
    except (StepwellError, OSError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"  # without the number
        if options.json:
            sys.stdout.write(json.dumps({"ok": False, "error": said, "kind": type(error).__name__}) + "\n")
        else:
            sys.stderr.write(f"stepwell: {said}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stepwell: interrupted\n")
        return 130  # as a shell says it
    try:
        if options.json:
            sys.stdout.write(json.dumps({"ok": report.ok, **report.data}, indent=2) + "\n")
        else:
            _print(report)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        if not isinstance(error, BrokenPipeError):  # then whoever read, head for example, has seen enough
            sys.stderr.write(f"stepwell: {error}\n")
        return 1
    return 0 if report.ok else 1


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401 - only whether it is there
    except ImportError:
        return False
    return True


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for shown in report.tables:
        console.print(Text(shown.title, "bold"))  # not as the table's title, which is cut where the table ends
        table = RichTable(header_style="bold")
        for number, name in enumerate(shown.columns):
            last = number == len(shown.columns) - 1
            table.add_column(name, justify=shown.justify if number else "left", no_wrap=not last)
        for row in shown.rows:
            table.add_row(*(Text(cell) for cell in row))
        least = _least_width(shown)
        table.width = least if least > console.width else None
        console.print(table, no_wrap=True, crop=False)
    for text in report.texts(console.width):
        console.print(_coloured(text), no_wrap=True, overflow="ignore", crop=False)  # a heading may go beyond the edge


_COLOURS = {  # of an action, by its letter; those of pictures
    "F": "white on #3f6fa8",
    "B": "white on #3d8f5f",
    "I": "white on #2f8f8c",
    "W": "black on #d9822b",
    "&": "white on #3d8f5f",
    "*": "white on #6b6b6b",
    "{": "white on #6b6b6b",
}
_ACTION = re.compile(r"\d*([FBIW&*{])(?:\d+&\d*[BI]\d+|[\w-]+\}\d*|\d*)-*")


def _coloured(text: str) -> Any:
    """A timeline with its actions in colours, where the terminal has them."""
    from rich.text import Text

    coloured = Text()
    for line in text.splitlines(keepends=True):
        name, bar, lane = line.partition("|")
        coloured.append(name + bar)
        if not bar:
            continue
        at = 0
        for found in _ACTION.finditer(lane):
            coloured.append(lane[at : found.start()], "dim")
            coloured.append(found.group(), _COLOURS[found.group(1)])
            at = found.end()
        coloured.append(lane[at:], "dim")
    return coloured


def _least_width(shown: Table) -> int:
    """What a table needs, for numbers are never cut: in a narrow terminal it goes beyond the edge. Its last column wraps."""
    *whole, last = zip(shown.columns, *shown.rows, strict=True)
    lines = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in whole]
    return sum(lines) + max(len(word) for cell in last for word in cell.split()) + 3 * len(shown.columns) + 1
