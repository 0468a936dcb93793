"""The pure modules decide without torch: each is loaded in a fresh interpreter that has nothing but what they may use.

Their packages' `__init__` does not run there (it may import torch), and an import is refused even where the module would
swallow the refusal or only make it inside a function.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

# The one list of pure modules: files and whole folders, relative to a layer's package.
PURE = {
    "stepwell_meta": ["exceptions.py", "_mesh_key.py"],
    "stepwell_mesh": ["exceptions.py", "_layout.py", "_topology.py"],
    "stepwell_p2p": [
        "exceptions.py",
        "_require.py",
        "_placement.py",
        "_op.py",
        "_channels.py",
        "_order.py",
        "_step.py",
        "_ends.py",
        "_run.py",
        "_cycle.py",
        "_transport.py",
        "_batch.py",
        "_failure.py",
        "_tags.py",
    ],
    "stepwell_stage": [
        "exceptions.py",
        "schedules.py",
        "plan",
        "split/_units.py",
        "split/_values.py",
        "split/_demand.py",
        "split/_least.py",
        "split/_place.py",
        "split/_ways.py",
    ],
    "stepwell_graphpasses": ["exceptions.py", "_plan.py"],
}
ALLOWED = ["attr", "attrs", "typing_extensions"]
LATE = ["matplotlib"]  # drawing a plan needs it, and asks for it inside the function that draws


def files(package: Path, entries: list[str]) -> list[Path]:
    paths = [package / entry for entry in entries]
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def module_name(package: Path, file: Path) -> str:
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def installed(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None, f"{name} has no __init__.py"
    return Path(spec.origin).parent


def impurities(packages: dict[Path, list[str]]) -> dict[str, list[str]]:
    """What the modules import that they may not: as they load, and, by their text, inside functions."""
    modules = {
        module_name(package, file): file for package, entries in packages.items() for file in files(package, entries)
    }
    question = {"pure": [*modules], "where": {package.name: str(package) for package in packages}, "allowed": ALLOWED}
    probe = Path(__file__).with_name("pure_probe.py")
    answer = subprocess.run(
        [sys.executable, "-I", str(probe)], input=json.dumps(question), capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    found: dict[str, list[str]] = json.loads(answer.stdout)
    for name, file in modules.items():
        if late := late_imports(ast.parse(file.read_text())):
            found.setdefault(name, []).extend(late)
    return found


def late_imports(tree: ast.Module) -> list[str]:
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [str(node.module)]
                else:
                    continue
                found += [
                    f"imports {name} inside {function.name}()"
                    for name in names
                    if name.partition(".")[0] not in {*ALLOWED, *LATE, *PURE, *sys.stdlib_module_names}
                ]
    return found


def test_pure_modules_import_no_torch() -> None:
    packages = {installed(name): entries for name, entries in PURE.items()}
    missing = [
        f"{package.name}/{one}"
        for package, entries in packages.items()
        for one in entries
        if not (package / one).exists()
    ]
    assert not missing, "listed in PURE, and not there"
    assert not impurities(packages)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import torch", "tried to import torch"),
        ("import numpy", "tried to import numpy"),
        ("from torch import nn", "tried to import torch"),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", "tried to import torch"),
        ("from lower._impure import x", "tried to import lower._impure"),
        ("from lower import thing", "tried to import lower.thing"),
        ("from ._helper import y", "tried to import upper._helper"),
        ("def f():\n    import torch", "imports torch inside f()"),
    ],
)
def test_an_impure_module_is_found(tmp_path: Path, source: str, complaint: str) -> None:
    upper = lay_out(tmp_path, source)
    found = impurities({upper: ["_decide.py"], tmp_path / "lower": ["exceptions.py"]})
    assert [*found] == ["upper._decide"]
    assert complaint in " · ".join(found["upper._decide"])


def test_what_pure_modules_may_do_is_allowed(tmp_path: Path) -> None:
    upper = lay_out(
        tmp_path,
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "import attrs, json, typing_extensions\n"
        "from lower.exceptions import LowerError\n"
        "if TYPE_CHECKING:\n"
        "    import torch\n",
    )
    assert not impurities({upper: ["_decide.py"], tmp_path / "lower": ["exceptions.py"]})


def lay_out(folder: Path, source: str) -> Path:
    """Two packages whose `__init__` imports torch, as ours do."""
    for name, modules in {
        "lower": {"exceptions": "class LowerError(Exception): ...", "_impure": "import torch\nx = 1"},
        "upper": {"_decide": source, "_helper": "y = 1"},
    }.items():
        (folder / name).mkdir()
        for module, text in {"__init__": "import torch\nthing = 1", **modules}.items():
            (folder / name / f"{module}.py").write_text(text)
    return folder / "upper"
