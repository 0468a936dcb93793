"""Every check and task of stepwell. `nox` runs the checks; `nox --list` shows the rest.

Each session works on built wheels in an environment of its own, with only what those wheels declare. torch is large, so
it is unpacked once and lent to each environment by a `.pth` file; everything else is installed as a user would. An
environment is kept between runs, and made anew when what it should hold has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import Any

import nox
from nox.virtualenv import VirtualEnv
from packaging.requirements import Requirement
from packaging.version import Version

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"  # with pip: uv does not see a torch that is lent by a .pth
nox.options.reuse_venv = "yes"  # _install() makes an environment anew where its requirements changed
nox.options.sessions = ["lint", "types", "tests", "integration"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
# torch says so at each start, and nothing here needs it
QUIET = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}
ALL_EXTRAS = ("test", "cli", "plot")  # not npu: that needs such a device


@dataclass(frozen=True)
class Layer:
    """One distribution: a folder with a pyproject.toml."""

    folder: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def distribution(self) -> str:
        return str(self.project["name"])

    @property
    def module(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def name(self) -> str:
        """As in the names of sessions: `meta`, …, and `stepwell` for the meta-package."""
        return self.distribution.removeprefix("stepwell-")

    @property
    def version(self) -> str:
        return str(self.project["version"])

    @property
    def tag(self) -> str:
        return f"{self.distribution}=={self.version}"

    @cached_property
    def digest(self) -> str:
        """Of all that its wheel is made of."""
        files = [self.folder / "pyproject.toml", *self.folder.glob("README.md"), *(self.folder / "src").rglob("*.py")]
        known = [(str(path.relative_to(self.folder)), path.read_bytes()) for path in sorted(files)]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]

    def provided(self, *extras: str) -> list[str]:
        """Those of the extras that this distribution has."""
        return [extra for extra in extras if extra in self.project["optional-dependencies"]]

    def requirements(self, *extras: str) -> list[Requirement]:
        optional = [self.project["optional-dependencies"][extra] for extra in self.provided(*extras)]
        return [Requirement(line) for line in chain(self.project["dependencies"], *optional)]


def _layers(root: Path) -> dict[str, Layer]:
    """The distributions of a checkout by name, lowest first, the meta-package last."""
    folders = [*sorted(path.parent for path in root.glob("packages/*/pyproject.toml")), root]
    everything = {layer.name: layer for layer in map(Layer, folders)}
    return dict(sorted(everything.items(), key=lambda item: len(_closure(item[1], everything))))


def _closure(layer: Layer, everything: dict[str, Layer]) -> list[Layer]:
    """The layer and the siblings that it declares, and those that they declare, lowest first."""
    found: list[Layer] = []
    declared = {requirement.name for requirement in layer.requirements()}
    for sibling in everything.values():
        if sibling.distribution in declared:
            found += [one for one in _closure(sibling, everything) if one not in found]
    return [*found, layer]


EVERYTHING = _layers(ROOT)
WHOLE = EVERYTHING["stepwell"]
LAYERS = [name for name in EVERYTHING if name != WHOLE.name]
EXAMPLES = [Layer(path.parent) for path in sorted(ROOT.glob("examples/*/pyproject.toml"))]

each_layer = nox.parametrize("layer", [nox.param(name, id=name) for name in LAYERS])
each_distribution = nox.parametrize("layer", [nox.param(name, id=name) for name in EVERYTHING])


# -- environments ----------------------------------------------------------------------------------------------------


def _tool(name: str) -> str:
    """A development tool with its range, which stands once: in requirements-dev.txt."""
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines():
        if re.match(rf"{name}\b", line):
            return line.partition("#")[0].strip()
    raise LookupError(f"requirements-dev.txt names no {name}")


def _pinned_torch() -> str:
    pins = [line.strip() for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
    if len(pins) != 1:
        raise LookupError(f"expected one line torch==VERSION in {CONSTRAINTS.name}, found {pins}")
    return pins[0]


def _ask(session: nox.Session, code: str, *arguments: str) -> str:
    """What the environment's Python prints."""
    return str(session.run("python", "-c", code, *arguments, silent=True, log=False)).strip()


def _made_once(session: nox.Session, name: str, *command: str, env: dict[str, str] | None = None) -> Path:
    """A folder that all environments share, made by a command that takes its path as the last argument."""
    cache = session.cache_dir.resolve()
    folder = cache / re.sub(r"[^\w.]+", "-", name)
    if not folder.is_dir():
        session.log(f"making {folder.name}, once for all environments")
        with tempfile.TemporaryDirectory(dir=cache) as partial:  # a run that is cut short leaves no half
            session.run_install("python", "-m", *command, f"{partial}/it", env=env, silent=True)
            if not folder.is_dir():  # else another session was first
                os.rename(f"{partial}/it", folder)
    return folder


def _unpack(session: nox.Session, requirement: str) -> Path:
    """A requirement and what it needs, unpacked once for each Python."""
    python = _ask(session, "import sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_platform())")
    return _made_once(session, f"{requirement}-{python}", "pip", "install", "-q", requirement, "--target")


def _wheel(session: nox.Session, layer: Layer) -> Path:
    """The layer's wheel; built without isolation, for flit_core needs nothing else and is quick."""
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    env = {"PYTHONPATH": str(_unpack(session, backend))}
    name = f"wheel-{layer.name}-{layer.digest}"
    (wheel,) = _made_once(session, name, "flit_core.wheel", str(layer.folder), "--outdir", env=env).glob("*.whl")
    return wheel


def _renew(session: nox.Session, contents: object) -> None:
    """Make a kept environment anew where it was not made for these contents."""
    environment = session.virtualenv
    stamp = Path(environment.location, "made-for.json")
    if stamp.exists() and stamp.read_text() != json.dumps(contents) and isinstance(environment, VirtualEnv):
        session.log("the requirements changed: making the environment anew")
        environment.reuse_existing = False
        environment.create()
    stamp.write_text(json.dumps(contents))


def _install(
    session: nox.Session,
    layers: Sequence[Layer],
    *options: str,
    extras: Sequence[str] = (),
    torch: str | None = None,
    constraints: Sequence[str] = (),
) -> None:
    """Install wheels of these layers, what they and the extras declare, and the lent torch; but not what is there already."""
    torch = torch or _pinned_torch()
    declared = {layer.name: [str(one) for one in layer.requirements(*extras)] for layer in layers}
    _renew(session, [torch, declared, options, constraints])
    place, folder = Path(session.virtualenv.location), _purelib(session)
    (folder / "lent.pth").write_text(f"{_unpack(session, torch)}\n")
    stamp, contents = place / "installed.json", json.dumps({layer.name: layer.digest for layer in layers})
    if options or not stamp.exists() or stamp.read_text() != contents:
        stamp.unlink(missing_ok=True)
        (place / "constraints.txt").write_text("\n".join([torch, *constraints]))
        # pip keeps an installed wheel of the same version, so ours go first: what is tested is what was built just now.
        if old := [layer.distribution for layer in layers if [*folder.glob(f"{layer.module}-*.dist-info")]]:
            session.run_install("python", "-m", "pip", "uninstall", "-qqy", *old)
        names = [",".join(layer.provided(*extras)) for layer in layers]
        wheels = [
            f"{_wheel(session, layer)}{f'[{ones}]' if ones else ''}" for layer, ones in zip(layers, names, strict=True)
        ]
        # Python compiles what the tests import, which is a part of it.
        session.install("--no-compile", "-c", str(place / "constraints.txt"), *wheels, *options)
        stamp.write_text(contents)
    _check_installed(session, [layer for layer in layers if layer not in EXAMPLES])


def _purelib(session: nox.Session) -> Path:
    return Path(_ask(session, "import sysconfig; print(sysconfig.get_path('purelib'))"))


def _check_installed(session: nox.Session, layers: Sequence[Layer]) -> None:
    """Refuse an environment that sees the source tree, or a layer that was not declared."""
    look = (
        "import importlib.util, json, sys\n"
        "specs = {name: importlib.util.find_spec(name) for name in json.loads(sys.argv[1])}\n"
        "print(json.dumps({name: spec.origin for name, spec in specs.items() if spec}))"
    )
    names = json.dumps([layer.module for layer in EVERYTHING.values()])
    found = json.loads(_ask(session, look, names))
    folder = _purelib(session)
    wanted = {layer.module: str(folder / layer.module / "__init__.py") for layer in layers}
    if found != wanted:
        session.error(f"this environment should hold {wanted} and no other layer, and it holds {found}")
    session.log(f"testing the built wheels of {', '.join(layer.distribution for layer in layers)}")


def _is_gpu_build(requires: Iterable[str] | None) -> bool:
    return any(line.startswith(("cuda-", "nvidia-", "pytorch-triton-")) for line in requires or ())


def _other_torch(session: nox.Session, requirement: str, instead: str) -> str:
    """The exact torch that pip would take; where the pinned one is a CPU build, a GPU build must be asked for."""
    report = Path(session.virtualenv.location, "torch.json")
    options = ["-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report)]
    session.run_install("python", "-m", "pip", "install", *options, requirement)
    torch = json.loads(report.read_text())["install"][0]["metadata"]
    pinned = _unpack(session, _pinned_torch())
    likes_gpu = any(_is_gpu_build(one.requires) for one in distributions(name="torch", path=[str(pinned)]))
    if _is_gpu_build(torch.get("requires_dist")) and not (_take(session, "--gpu-build") or likes_gpu):
        session.error(
            f"{requirement} is to be had here only as a GPU build (torch {torch['version']}, several GB with what it "
            f"requires), and the pinned torch is a CPU build. Show pip an index with CPU builds, {instead}, or take "
            f"the GPU build: nox -s {session.name} -- --gpu-build"
        )
    return f"torch=={torch['version']}"


def _take(session: nox.Session, option: str) -> bool:
    """Take an option of ours out of the arguments behind `--`; the rest is pytest's."""
    if option not in session.posargs:
        return False
    session.posargs.remove(option)
    return True


# -- the checks ------------------------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint everything with ruff."""
    session.install(_tool("ruff"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check every source file, and this one, with mypy --strict."""
    declared = {str(one) for layer in EVERYTHING.values() for one in layer.requirements(*ALL_EXTRAS)}
    third_party = sorted(line for line in declared if not line.startswith("stepwell"))
    _renew(session, [_pinned_torch(), third_party])
    (_purelib(session) / "lent.pth").write_text(f"{_unpack(session, _pinned_torch())}\n")
    session.install("--no-compile", "-c", str(CONSTRAINTS), _tool("mypy"), _tool("nox"), *third_party)
    sources = [str(layer.folder / "src") for layer in EVERYTHING.values()]
    # A cache of its own: an editor's mypy sees torch elsewhere, and each would throw away the other's work.
    session.run("mypy", "--cache-dir", str(session.cache_dir / "mypy"), *sources, "noxfile.py")


@nox.session
@each_layer
def tests(session: nox.Session, layer: str) -> None:
    """Test one layer with what it and its extras declare, and the examples that stand on it; `--` for pytest's arguments."""
    closure = _closure(EVERYTHING[layer], EVERYTHING)
    examples = [one for one in EXAMPLES if _closure(one, EVERYTHING)[:-1] == closure]
    _install(session, [*closure, *examples], extras=ALL_EXTRAS)
    session.run(
        "pytest", *(f"{one.folder.relative_to(ROOT)}/tests" for one in (closure[-1], *examples)), *session.posargs
    )


@nox.session
def integration(session: nox.Session) -> None:
    """Test the joints between the layers, the rules that they share, and the code on every page and in docstrings."""
    _install(session, [*EVERYTHING.values()], extras=ALL_EXTRAS)
    session.run("pytest", "tests", *session.posargs)


# -- on request ------------------------------------------------------------------------------------------------------


@nox.session
def train(session: nox.Session) -> None:
    """Train a small GPT through a pipeline; options behind `--` are those of examples/train_text.py."""
    _install(session, [*EVERYTHING.values()], extras=["cli"])
    session.run("python", "examples/train_text.py", *session.posargs, env=QUIET)


@nox.session
def models(session: nox.Session) -> None:
    """Cut models of transformers into stages and compare; `-- --torch` also asks torch's own pipeline() anew."""
    _install(session, [*EVERYTHING.values()], "transformers>=5.24,<6", extras=ALL_EXTRAS)
    session.run("pytest", "models", "--ignore=models/test_graph.py", *session.posargs)


@nox.session
def graph_models(session: nox.Session) -> None:
    """Train whole models as graphs and compare with torch's own FSDP2, HSDP and DDP; capture 89 of transformers."""
    _install(session, [*EVERYTHING.values()], "transformers>=5.24,<6", extras=ALL_EXTRAS)
    session.run("pytest", "-m", "", "tests/test_graph_models.py", "models/test_graph.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark with the arguments behind `--` (`--quick` for a short one)."""
    scripts = sorted(path for path in ROOT.glob("benchmarks/*.py") if not path.name.startswith("_"))
    _install(session, [*EVERYTHING.values()], extras=ALL_EXTRAS)
    for script in scripts:
        session.run("python", str(script.relative_to(ROOT)), *session.posargs, env=QUIET)


@nox.session
def floors(session: nox.Session) -> None:
    """Test every layer with the oldest versions that are declared; `-- --pinned-torch` leaves torch as it is."""
    oldest: dict[str, Version] = {}
    for layer in EVERYTHING.values():
        for requirement in layer.requirements(*ALL_EXTRAS):
            bounds = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
            if len(bounds) != 1:
                session.error(f"{layer.distribution} declares {requirement}: expected one floor, >=VERSION")
            oldest[requirement.name] = max(bounds[0], oldest.get(requirement.name, bounds[0]))
    floor, pinned = f"torch=={oldest.pop('torch')}", _take(session, "--pinned-torch")
    instead = "check every other floor (nox -s floors -- --pinned-torch)"
    torch = _pinned_torch() if pinned else _other_torch(session, floor, instead)
    limits = [f"{name}=={version}" for name, version in oldest.items() if not name.startswith("stepwell")]
    _install(session, [*EVERYTHING.values()], extras=ALL_EXTRAS, torch=torch, constraints=limits)
    session.run("pytest", "packages", "tests", "--ignore=tests/test_docs.py", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Test every layer with the newest torch, and the newest of everything else that is allowed."""
    torch = _other_torch(session, "torch", "wait for one")
    upgrade = ["--upgrade", "--upgrade-strategy", "eager"]
    _install(session, [*EVERYTHING.values()], *upgrade, extras=ALL_EXTRAS, torch=torch)
    session.run("pytest", "packages", "tests", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device."""
    if shutil.which("nvidia-smi") is None:
        session.error("this session needs a CUDA device, and nvidia-smi is not here: install NVIDIA's driver")
    _accelerated(session, "cuda", f"{_pinned_torch()} sees none: it must be a CUDA build, and the driver new enough")


@nox.session
def npu(session: nox.Session) -> None:
    """Run the tests that need an Ascend NPU."""
    if not Path("/dev/davinci_manager").exists():
        session.error("this session needs an Ascend NPU, and /dev/davinci_manager is not here: install its driver")
    _accelerated(session, "npu", "torch_npu sees none: install the CANN toolkit that it names and source set_env.sh")


def _accelerated(session: nox.Session, device: str, otherwise: str) -> None:
    _install(session, [*EVERYTHING.values()], extras=[*ALL_EXTRAS, *(["npu"] if device == "npu" else [])])
    if _ask(session, "import torch; print(torch.accelerator.current_accelerator(check_available=True))") != device:
        session.error(otherwise)
    mark = "gpu" if device == "cuda" else device
    session.run("pytest", "-m", mark, "packages", "tests", *session.posargs)


# -- releases --------------------------------------------------------------------------------------------------------


@nox.session
@each_distribution
def build(session: nox.Session, layer: str) -> None:
    """Build one distribution's sdist and wheel in dist/, and look into them."""
    session.install(_tool("build"))
    _build(session, EVERYTHING[layer])


def _build(session: nox.Session, layer: Layer) -> None:
    session.run("python", "-m", "build", "--outdir", "dist", str(layer.folder))  # the wheel from the sdist
    stem = ROOT / "dist" / f"{layer.module}-{layer.version}"
    with zipfile.ZipFile(f"{stem}-py3-none-any.whl") as wheel:
        inside = set(wheel.namelist())
    sources = layer.folder / "src"
    wanted = {path.relative_to(sources).as_posix() for path in sources.rglob("*.py")}
    wanted |= {f"{layer.module}/py.typed", f"{stem.name}.dist-info/licenses/LICENSE"}
    code = {name for name in inside if ".dist-info/" not in name}
    if missing := wanted - inside:
        session.error(f"the wheel lacks {sorted(missing)}")
    if surplus := code - wanted:
        session.error(f"the wheel holds {sorted(surplus)}, which the source folder does not")
    session.log(f"built dist/{stem.name}: {len(code)} files of code")


@nox.session
@each_distribution
def changelog(session: nox.Session, layer: str) -> None:
    """Show what one distribution's next release would add to its CHANGELOG.md."""
    session.install(_tool("towncrier"))
    session.run("towncrier", "build", "--draft", *_towncrier_options(EVERYTHING[layer]))


def _towncrier_options(layer: Layer) -> list[str]:
    return ["--dir", str(layer.folder), "--version", layer.version]


@nox.session
@each_distribution
def release(session: nox.Session, layer: str) -> None:
    """Write one distribution's changelog, build it, commit and tag. Pushes nothing."""
    it = EVERYTHING[layer]
    reasons = []
    if dirty := _git("status", "--porcelain"):
        reasons.append(f"the tree is dirty: commit or remove\n{dirty}")
    if _git("tag", "--list", it.tag):
        reasons.append(f"the tag {it.tag} exists: raise the version in {it.folder.relative_to(ROOT)}/pyproject.toml")
    kinds = ("breaking", "deprecation", "feature", "fix")
    if not any([*it.folder.glob(f"changelog.d/*.{kind}.md")] for kind in kinds):
        reasons.append(f"{it.folder.relative_to(ROOT)}/changelog.d holds no fragment: say what changed for its users")
    if reasons:
        session.error("\n".join([f"{it.tag} is not released:", *reasons]))
    session.install(_tool("build"), _tool("towncrier"))
    paths = [str(it.folder / "CHANGELOG.md"), str(it.folder / "changelog.d")]
    try:
        session.run("towncrier", "build", "--yes", *_towncrier_options(it))
        _build(session, it)
        _git("commit", "--quiet", "--message", f"Release {it.distribution} {it.version}", "--", *paths)
    except BaseException:
        _git("restore", "--staged", "--worktree", "--", *paths)  # the tree was clean, so this is as it was
        raise
    _git("tag", "--annotate", "--message", f"{it.distribution} {it.version}", it.tag)
    session.log(f"committed and tagged {it.tag}; RELEASING.md says what to push, and where")


@nox.session
@each_layer
def compat(session: nox.Session, layer: str) -> None:
    """Test this layer's new wheel under the last tagged tests of each layer above it."""
    new = EVERYTHING[layer]
    above = [EVERYTHING[name] for name in LAYERS if name != layer and new in _closure(EVERYTHING[name], EVERYTHING)]
    if not above:
        session.skip(f"no layer stands above {layer}")
    tags = {one: tag for one in above if (tag := _last_tag(one))}
    untagged = ", ".join(one.name for one in above if one not in tags)
    if untagged:
        session.log(f"never released, so with no tagged tests to run: {untagged}")
    if not tags:
        session.skip(f"no layer above {layer} was ever released: there is nothing yet to stay compatible with")
    for one, tag in tags.items():
        _run_tagged_tests(session, new, one.name, tag)


def _last_tag(layer: Layer) -> str | None:
    tags = _git("tag", "--list", "--sort=-version:refname", f"{layer.distribution}==*").split()
    return tags[0] if tags else None


def _run_tagged_tests(session: nox.Session, new: Layer, above: str, tag: str) -> None:
    """The tests of `above` as tagged, on wheels as tagged, except that of the new layer."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "tagged.tar")
        _git("archive", "--output", str(archive), tag)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        tagged = _layers(Path(folder))
        closure = _closure(tagged[above], tagged)
        for one in closure:
            for requirement in one.requirements():
                if requirement.name == new.distribution and new.version not in requirement.specifier:
                    session.log(f"{tag}: its {one.distribution} declares {requirement}, which leaves {new.version} out")
                    return
        session.log(f"{tag}: its tests, with {new.distribution} {new.version} as it is now")
        _install(session, [new if one.name == new.name else one for one in closure], extras=["test"])
        with session.chdir(folder):
            session.run("pytest", f"packages/{above}/tests", *session.posargs)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
