"""Loads modules without their packages' `__init__` in an interpreter where nothing else can be imported.

Run as a program with a JSON object on standard input: `pure` names modules, `where` gives each top package's folder, and
`allowed` the other packages that may be imported beside the standard library. Prints a JSON object: module → its faults.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class Gate:
    """A meta-path finder that comes first: it stops what is not allowed, and remembers who asked for it."""

    def __init__(self, pure: set[str], where: dict[str, str], allowed: set[str]) -> None:
        self.pure = pure
        self.where = where
        self.allowed = allowed | sys.stdlib_module_names
        self.refused: list[str] = []

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        if top in self.where:
            folder = Path(self.where[top], *rest.split(".")) if rest else Path(self.where[top])
            if name in self.pure:
                return None  # the ordinary finders load it
            if folder.is_dir():
                shell = ModuleSpec(name, None, is_package=True)  # the package without its __init__
                shell.submodule_search_locations = [str(folder)]
                return shell
        elif top in self.allowed:
            return None
        if importer().partition(".")[0] in self.where:  # the standard library tries names of Jython's, and goes on
            self.refused.append(name)  # said even where the module swallows the error
        raise ImportError(f"{name} is not a pure module")


def importer() -> str:
    """The module whose import statement is being carried out."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals["__name__"].startswith("importlib."):
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def main() -> None:
    """See the module's docstring."""
    asked = json.load(sys.stdin)
    gate = Gate(set(asked["pure"]), asked["where"], set(asked["allowed"]))
    sys.meta_path.insert(0, gate)
    found: dict[str, list[str]] = {}
    for name in asked["pure"]:
        gate.refused.clear()
        problems = []
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(str(error))
        problems += [f"tried to import {one}" for one in gate.refused]
        if "torch" in sys.modules:
            problems.append("torch is loaded")
        if problems:
            found[name] = problems
    json.dump(found, sys.stdout)


main()
