"""The public names of each layer are those listed in `public_api/<layer>.txt`: a new one fails until it is listed.

Update the lists with `python tests/test_public_api.py`, and read the difference before you commit it: a name that goes
away, or changes its place, is a breaking change.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

LISTS = Path(__file__).with_name("public_api")
PACKAGES = {
    "meta": "stepwell_meta",
    "mesh": "stepwell_mesh",
    "p2p": "stepwell_p2p",
    "stage": "stepwell_stage",
    "graphpasses": "stepwell_graphpasses",
    "stepwell": "stepwell",
}


def public_names(package: str) -> list[str]:
    """Every name in the `__all__` of the package, and of its modules whose name is not private."""
    folder = Path(str(importlib.import_module(package).__file__)).parent
    doors = sorted(f"{package}.{file.stem}" for file in folder.glob("*.py") if not file.stem.startswith("_"))
    return [f"{door}.{name}" for door in [package, *doors] for name in sorted(importlib.import_module(door).__all__)]


def listed(layer: str) -> list[str]:
    return (LISTS / f"{layer}.txt").read_text().split()


@pytest.mark.parametrize("layer", PACKAGES)
def test_public_names_are_listed(layer: str) -> None:
    names, known = public_names(PACKAGES[layer]), listed(layer)
    new, gone = sorted({*names} - {*known}), sorted({*known} - {*names})
    assert names == known, f"not listed: {new}; listed and gone: {gone}; to list: python tests/test_public_api.py"


@pytest.mark.parametrize("layer", PACKAGES)
def test_public_names_exist_and_are_documented(layer: str) -> None:
    faults = []
    for path in public_names(PACKAGES[layer]):
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name, None)
        if value is None:
            faults.append(f"{path} is in __all__ and does not exist")
        elif (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__:
            faults.append(f"{path} has no docstring")
    assert not faults


def test_there_is_no_other_list() -> None:
    assert sorted(path.stem for path in LISTS.iterdir()) == sorted(PACKAGES)


if __name__ == "__main__":
    for one, name in PACKAGES.items():
        (LISTS / f"{one}.txt").write_text("".join(f"{line}\n" for line in public_names(name)))
