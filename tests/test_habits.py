"""What style asks of every source file, where a machine can see it; and that the tooling's pieces agree with each other."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [*sorted(ROOT.glob("packages/*/src/*")), ROOT / "src/stepwell"]
SOURCES = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]
DISTRIBUTIONS = [*sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")), ROOT]
FRAGMENT = re.compile(r"[a-z0-9][a-z0-9-]*\.(breaking|feature|fix|deprecation)\.md")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", [file for file in SOURCES if file.name == "__init__.py"], ids=name_of)
def test_init_holds_imports_and_all_only(file: Path) -> None:
    others = [ast.unparse(node) for node in ast.parse(file.read_text()).body if not belongs_in_init(node)]
    assert not others


def belongs_in_init(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant(str())):
            return True
        case ast.Assign([ast.Name("__all__")]):
            return True
    return False


def test_no_file_is_longer_than_500_lines() -> None:
    lengths = {name_of(file): len(file.read_text().splitlines()) for file in [*SOURCES, ROOT / "noxfile.py"]}
    assert not {name: length for name, length in lengths.items() if length > 500}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_public_doors_are_the_package_exceptions_and_testing(package: Path) -> None:
    modules = {file.stem for file in package.glob("*.py") if not file.stem.startswith("_")}
    more = {"stepwell_stage": {"schedules"}}  # schedules are picked by name: schedules.gpipe
    assert modules <= {"exceptions", "testing", *more.get(package.name, ())}
    assert (package / "py.typed").exists()


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_fragments_are_named_as_towncrier_reads_them(folder: Path) -> None:
    names = [path.name for path in (folder / "changelog.d").iterdir() if path.name != ".gitkeep"]
    assert not [name for name in names if not FRAGMENT.fullmatch(name)]


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_projects_declare_floors_and_sibling_ranges(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for line in [*project["dependencies"], *(line for extra in optional.values() for line in extra)]:
        assert ">=" in line, "a floor, which `nox -s floors` tests"
        assert "==" not in line, "a pin would keep a user from any other version"
        assert not line.startswith("stepwell") or "<" in line, "siblings by range"


def test_the_meta_package_offers_its_extras() -> None:
    lines = [line for line in importlib.metadata.requires("stepwell") or [] if "extra ==" in line]
    extras = {
        extra: re.findall(rf"^([\w-]+).*extra == [\"']{extra}", "\n".join(lines), re.M)
        for extra in ("npu", "plot", "cli")
    }
    assert extras == {"npu": ["torch-npu"], "plot": ["matplotlib"], "cli": ["rich"]}


def test_projects_agree() -> None:
    """`nox -s floors` tests one floor for a package, so no two layers declare two; and one back end builds them all."""
    tables = [tomllib.loads((folder / "pyproject.toml").read_text()) for folder in DISTRIBUTIONS]
    for section in ("build-system", "requires-python", "license"):
        assert len({str(table.get(section, table["project"].get(section))) for table in tables}) == 1
    declared: dict[str, set[str]] = {}
    for table in tables:
        optional = table["project"]["optional-dependencies"].values()
        for line in [*table["project"]["dependencies"], *(line for extra in optional for line in extra)]:
            declared.setdefault(re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0], set()).add(line)
    assert not {name: lines for name, lines in declared.items() if len(lines) > 1}


def test_the_readme_opens_with_the_two_commands() -> None:
    install = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox"
    readme = (ROOT / "README.md").read_text()
    assert [line.strip() for line in readme.splitlines() if install in line][:2] == [f"{install} -s train", install]
    assert install in (ROOT / ".ci/run").read_text(), ".ci/run calls the README's test command"
