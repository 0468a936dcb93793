"""A layer imports only what its pyproject.toml declares, torch's private names only in `_compat.py`.

The clean environments of `nox -s tests` catch an upward import; these tests read the source, so they also catch an import
that works by luck: a sibling or a package that comes along with another one. The last tests show that they can fail.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {folder.name: folder for folder in sorted(ROOT.glob("packages/*")) if (folder / "pyproject.toml").exists()}
FOLDERS["stepwell"] = ROOT
# The imports whose name is not that of their distribution.
DISTRIBUTION_OF = {"attr": "attrs"}
# What a test kit needs beyond its layer is in the extra `test`: a user of the layer alone does not install it.
TEST_KIT = {"testing.py", "_pool.py", "_worker.py"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(folder: Path, *extras: str) -> set[str]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *(line for extra in extras for line in optional.get(extra, ()))]
    return {normalized(re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0]) for line in lines}


def sources(folder: Path) -> list[Path]:
    return sorted((folder / "src").rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Every absolute import: line, module, names taken out of it (relative ones stay inside the layer)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, str(node.module), tuple(alias.name for alias in node.names)


def undeclared(tree: ast.Module, own: str, at_import: set[str], anywhere: set[str]) -> list[str]:
    """Imports of what is not declared; what only an extra declares may be imported inside a function."""
    found = []
    inside = {id(node) for function in functions(tree) for node in ast.walk(function)}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            allowed = anywhere if id(statement) in inside else at_import
            for line, module, _ in imports(ast.Module([statement], [])):
                top = module.partition(".")[0]
                distribution = DISTRIBUTION_OF.get(top, normalized(top))
                if top != own and top not in sys.stdlib_module_names and distribution not in allowed:
                    found.append(f"line {line}: imports {module}, and {distribution} is not declared")
    return found


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_torch_names(tree: ast.Module) -> list[str]:
    """Private modules and names of torch, by import or by an attribute of something imported from torch."""
    found = []
    from_torch: set[str] = set()
    for line, module, names in imports(tree):
        if module.partition(".")[0] == "torch" and any(map(is_private, [*module.split("."), *names])):
            found.append(f"line {line}: imports {', '.join(names) or module} of {module}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            from_torch |= {alias.asname or "torch" for alias in node.names if alias.name.partition(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch" and not node.level:
            from_torch |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in from_torch:
                found.append(f"line {node.lineno}: uses {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_imports_are_declared(name: str) -> None:
    folder = FOLDERS[name]
    own = "stepwell" if name == "stepwell" else f"stepwell_{name}"
    needed, everything = declared(folder), declared(folder, "cli", "plot", "npu", "test")
    found = {
        str(path.relative_to(ROOT)): faults
        for path in sources(folder)
        if (
            faults := undeclared(
                ast.parse(path.read_text()), own, everything if path.name in TEST_KIT else needed, everything
            )
        )
    }
    assert not found


@pytest.mark.parametrize("name", FOLDERS)
def test_private_torch_names_are_in_compat(name: str) -> None:
    found = {
        str(path.relative_to(ROOT)): faults
        for path in sources(FOLDERS[name])
        if path.name != "_compat.py" and (faults := private_torch_names(ast.parse(path.read_text())))
    }
    assert not found


def test_layers_stand_as_designed() -> None:
    siblings = {
        name: {one.removeprefix("stepwell-") for one in declared(folder) if one.startswith("stepwell")}
        for name, folder in FOLDERS.items()
    }
    assert siblings == {
        "meta": set(),
        "mesh": {"meta"},
        "p2p": {"meta"},
        "stage": {"meta", "mesh", "p2p"},
        "graphpasses": {"meta", "mesh"},
        "stepwell": {"meta", "mesh", "p2p", "stage", "graphpasses"},
    }


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import stepwell_stage", "stepwell-stage is not declared"),
        ("from stepwell_stage.plan import lower", "stepwell-stage is not declared"),
        ("import stepwell", "stepwell is not declared"),
        ("import numpy as np", "numpy is not declared"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import stepwell_mesh",
            "stepwell-mesh is not declared",
        ),
        ("def f():\n    import stepwell_mesh", "stepwell-mesh is not declared"),
        ("import cloudpickle", "cloudpickle is not declared"),
        ("def f():\n    import cloudpickle", None),
        ("import attr, attrs, os.path, stepwell_meta._tensor", None),
        ("from ._tensor import TensorMeta", None),
    ],
)
def test_an_undeclared_import_is_found(source: str, fault: str | None) -> None:
    found = undeclared(
        ast.parse(source), "stepwell_p2p", {"stepwell-meta", "attrs"}, {"stepwell-meta", "attrs", "cloudpickle"}
    )
    assert [fault] == [one.rpartition("and ")[2] for one in found] if fault else not found


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import _x",
        "from torch.distributed.distributed_c10d import _get_default_group",
        "import torch\ntorch._C",
        "import torch.utils._pytree as pytree",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch import nn\ndef f():\n    return nn.modules._functions",
    ],
)
def test_a_private_torch_name_is_found(source: str) -> None:
    assert private_torch_names(ast.parse(source))


def test_a_dunder_or_a_public_name_of_torch_is_allowed() -> None:
    assert not private_torch_names(ast.parse("import torch\ntorch.__version__\ntorch.nn.Linear(1, 2)._parameters"))
