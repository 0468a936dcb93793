"""The code in README.md, packages/*/README.md, the other pages at the root and docs/*.md runs, and their links lead somewhere.

One page is one script: its ```python blocks run in order, in one fresh namespace and one process, warnings as errors. The
processes are forked from one that has torch loaded: that takes most of an interpreter's start, and is the same for every page.
Blocks in other languages (```console, ```text, …) are not run. The `>>>` examples of docstrings run too.
"""

from __future__ import annotations

import doctest
import importlib
import multiprocessing
import pkgutil
import re
import runpy
import textwrap
from pathlib import Path

import pytest

from stepwell_meta._compat import LOADED_LATE

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]
RUNNER = Path(__file__).with_name("page_runner.py")
PACKAGES = ["stepwell_meta", "stepwell_mesh", "stepwell_p2p", "stepwell_stage", "stepwell_graphpasses", "stepwell"]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[^`]*)$")
SAID = re.compile(r"""^(?: *print\(.*\)  # (?=[(\['"]*\d)|# (?=rank \d))(?P<said>.+)$""", re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def script(text: str) -> str:
    """The page with everything but its Python blocks blank, so that a traceback's line is the page's line."""
    lines: list[str] = []
    fence: re.Match[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if fence is None and match:
            if not match["language"].strip():
                raise ValueError(f"line {number}: a block without a language; say `text` where it is none")
            fence = match
            lines.append("")
        elif fence is not None and match and match["ticks"] == fence["ticks"] and not match["language"].strip():
            fence = None
            lines.append("")
        else:
            inside = fence is not None and fence["language"].strip() == "python"
            lines.append(line.removeprefix(fence["indent"]) if fence is not None and inside else "")
    if fence is not None:
        raise ValueError("the last block is not closed")
    return "\n".join(lines)


def broken_links(page: Path, text: str) -> list[str]:
    targets = [match["target"] for match in LINK.finditer(text)]
    files = [one.partition("#")[0] for one in targets if not re.match(r"[a-z]+:|#", one)]
    return [one for one in files if not (page.parent / one).exists()]


def unsaid(code: str, output: str) -> list[str]:
    """Of the numbers that comments say to be printed, and of printed tables, what no line of the output begins with."""
    said = [re.split(r" ?…|: (?![ \d.])|, and ", match["said"])[0] for match in SAID.finditer(code)]
    return [one for one in said if not any(line.startswith(one) for line in output.splitlines())]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(page: str, code: str, folder: Path) -> tuple[int | None, str]:
    """Exit code (None: still running after the deadline) and output of a script in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    # The server is one for the whole session, also for the pool of the other tests, so it holds what their workers need.
    context.set_forkserver_preload(
        ["torch", "torch.distributed", *LOADED_LATE, "cloudpickle", "stepwell_meta._worker", *PACKAGES]
    )
    file, output = folder / page, folder / "output.txt"
    file.write_text(code)
    names = {"PAGE_AND_OUTPUT": (str(file), str(output))}
    process = context.Process(target=runpy.run_path, args=(str(RUNNER), names), kwargs={"run_name": "__main__"})
    process.start()
    process.join(100)
    exit_code = process.exitcode
    process.kill()
    process.join()
    return exit_code, output.read_text() if output.exists() else ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    code = script(page.read_text())
    if not code.strip():
        return  # a page of prose
    exit_code, output = run(f"{page.stem}.py", code, tmp_path)
    assert exit_code == 0, f"{name_of(page)} (lines as in the page)\n{output}"
    assert not unsaid(code, output), f"{name_of(page)} prints something else\n{output}"


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("x = 1\n\nraise KeyError(x)", 'page.py", line 3'),
        ("import warnings\nwarnings.warn('old', DeprecationWarning)", "DeprecationWarning: old"),
        ("print(torch)", "NameError"),
        ("import sys\nsys.exit('no device')", "no device"),
    ],
)
def test_a_page_that_fails_is_found(code: str, complaint: str, tmp_path: Path) -> None:
    exit_code, output = run("page.py", code, tmp_path)
    assert exit_code == 1
    assert complaint in output


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_in_docstrings_hold(package: str) -> None:
    """A `>>>` example may use its module's names and the public ones of its layer."""
    top = importlib.import_module(package)
    names = [info.name for info in pkgutil.walk_packages(top.__path__, f"{package}.") if "__main__" not in info.name]
    modules = [importlib.import_module(name) for name in names]
    doors = [top, *(module for module in modules if module.__name__.count(".") == 1 and "._" not in module.__name__)]
    public = {name: getattr(door, name) for door in doors for name in getattr(door, "__all__", ())}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed = [
        module.__name__ for module in modules if doctest.testmod(module, extraglobs=public, optionflags=flags).failed
    ]
    assert not failed, "what was expected and what came is in the captured output"


def test_a_page_is_one_script_with_the_lines_of_the_page() -> None:
    page = textwrap.dedent(
        """\
        # Title
        ```python
        x = 1
        ```
        ```console
        $ rm -r x
        ```
        - item
          ```python
          if x:
              y = 2
          ```
        """
    )
    assert script(page).splitlines() == ["", "", "x = 1", "", "", "", "", "", "", "if x:", "    y = 2"]


@pytest.mark.parametrize("page", ["```\nx\n```", "```python\nx = 1\n"])
def test_a_block_without_a_language_or_an_end_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r"language|not closed"):
        script(page)


def test_a_page_that_says_other_numbers_than_it_prints_is_found() -> None:
    """The page of schedules promised 57.0 52.5, times of a version before, where 51.0 49.0 were printed."""
    code = """print(a)  # 57.0 52.5
print(b)  # (4, 3): known before anything runs
print(c)  # 2F1 2F2 …
print(table)
# rank 0: 0F0  .  0B0
print(d)  # of the machine"""
    assert unsaid(code, "57.0 52.5\n(4, 3)\n2F1 2F2 2F3\nrank 0: 0F0  .  0B0\n") == []
    assert unsaid(code, "51.0 49.0\n(4, 2)\n2F1 3F2 2F3\nrank 0: 0F0 0B0\n") == [
        "57.0 52.5",
        "(4, 3)",
        "2F1 2F2",
        "rank 0: 0F0  .  0B0",
    ]


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = "[a](there.md#part) [b](gone.md) [c](https://example.org) [d](#here) ![e](gone.svg)"
    assert broken_links(tmp_path / "page.md", text) == ["gone.md", "gone.svg"]
