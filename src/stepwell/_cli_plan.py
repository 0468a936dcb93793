"""``stepwell plan``, ``stepwell prove`` and ``stepwell timeline``."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from stepwell._cli_report import Report, Table
from stepwell.exceptions import PipelineError
from stepwell_p2p import ChannelPolicy, Rules
from stepwell_stage import (
    Costs,
    EdgeCost,
    Layer,
    Plan,
    Timeline,
    from_perfetto,
    lower,
    plan_search,
    prove,
    simulate,
    to_perfetto,
    to_png,
    to_svg,
)
from stepwell_stage.schedules import from_csv, to_csv

Commands = Any  # what ArgumentParser.add_subparsers returns; argparse has no public name for it

MOST_LAYERS = 10_000  # of one kind; "count" is a slip of the pen beyond
OF_THE_NETWORK = ("latency", "bandwidth", "overlap", "eager", "overlap_gain", "per_action")  # beside layers and edges
COSTS_HELP = """
The file of costs is JSON; times are seconds for one sample, sizes are bytes for one sample:

  {"layers": [{"count": 12, "forward": 1e-3, "backward": 2e-3, "activation_bytes": 4194304,
               "output_bytes": 524288, "parameter_bytes": 28311552, "overhead": 5e-5}],
   "latency": 2e-5, "bandwidth": 1.2e10}

"count" repeats a layer; only "forward" and "backward" are needed. "parameter_bytes" are of the layer, whatever the batch.
Edges that differ: "edges": [{"source": 0, "destination": 1, "latency": 1e-3, "bandwidth": 1e9}], from rank to rank.
"overlap_gain": 0.3 says that a handler of yours runs overlapped pairs as one, which saves 30 % of the shorter of the two.
"overlap": false says that both ends stop for each message, "eager": true that it may leave before its receive is posted, and
"per_action": 1e-5 what the executor itself takes before each action.
"""


def add_plan(commands: Commands, common: argparse.ArgumentParser) -> None:
    """The command ``plan``."""
    parser = commands.add_parser(
        "plan",
        parents=[common],
        help="the fastest plan for given costs and memory",
        epilog=COSTS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("costs", type=Path, help="JSON file with the costs of the layers, see below")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--batch", type=int, required=True, help="samples of one step")
    parser.add_argument("--memory", type=_size, help="bytes that a rank may hold, for example 40GiB")
    parser.add_argument(
        "--microbatches",
        type=_numbers,
        help="numbers of microbatches to try, for example 8,16 (default: those that divide --batch, and 1, 2, 4 and 8 a rank;"
        " at most 8 a rank)",
    )
    parser.add_argument("--stages-per-rank", type=_numbers, default=[1, 2, 3, 4], help="to try (default 1,2,3,4)")
    parser.add_argument("--schedules", type=_names, help="names to try, for example 1f1b,zbv (default: all)")
    parser.add_argument("--csv", type=_target, help="write the best schedule to this file")
    parser.add_argument(
        "--picture", type=_picture, help="draw the best plan to this .svg, .png or .json (Perfetto) file"
    )
    parser.set_defaults(run=_plan)


def add_prove(commands: Commands, common: argparse.ArgumentParser) -> None:
    """The command ``prove``."""
    parser = commands.add_parser("prove", parents=[common], help="whether a schedule or plan can be carried out")
    parser.add_argument("file", type=Path, help="a schedule or plan as CSV, in torch's form")
    parser.add_argument("--tagged", action="store_true", help="messages are matched by what they are, in any order")
    parser.add_argument("--buffered", action="store_true", help="sends are done when posted, not when received")
    names = [policy.value for policy in ChannelPolicy]
    parser.add_argument(
        "--channels", choices=names, default="per-edge", help="which messages share a channel (default per-edge)"
    )
    parser.set_defaults(run=_prove)


def add_timeline(commands: Commands, common: argparse.ArgumentParser) -> None:
    """The command ``timeline``."""
    parser = commands.add_parser("timeline", parents=[common], help="what happens when, simulated or measured")
    parser.add_argument(
        "files", nargs="+", type=Path, help="schedules or plans as CSV, simulated; or traces as JSON; drawn together"
    )
    parser.add_argument("--forward", type=float, default=1.0, help="seconds of an F, for simulations (default 1)")
    parser.add_argument(
        "--backward", type=float, default=2.0, help="seconds of a B; I and W take half each (default 2)"
    )
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of a message (default 0)")
    parser.add_argument(
        "--overlap-gain",
        type=float,
        help="what overlapped pairs save where a handler runs them as one: a share of the shorter of the two, 0 to 1; without,"
        " their forward and backward run one after the other",
    )
    parser.add_argument("--picture", type=_picture, help="draw to this .svg, .png or .json (Perfetto) file")
    parser.set_defaults(run=_timeline)


def _plan(options: argparse.Namespace) -> Report:
    layers, network = _read_costs(options.costs)
    found = plan_search(
        layers,
        options.ranks,
        batch_size=options.batch,
        memory_limit=options.memory,
        network=network,
        num_microbatches=options.microbatches,
        stages_per_rank=options.stages_per_rank,
        schedules=options.schedules,
    )
    timeline = simulate(found.best.plan, found.best.costs).timeline
    if options.csv is not None:
        to_csv(found.best.schedule, options.csv)
    _draw([timeline], options.picture)
    choices: list[dict[str, Any]] = [
        {
            "schedule": choice.schedule.name,
            "num_microbatches": choice.schedule.num_microbatches,
            "stages_per_rank": choice.schedule.placement.num_stages // options.ranks,
            "cuts": list(choice.cuts),
            "seconds": choice.makespan,
            "bubble": choice.bubble,
            "peak_bytes": list(choice.peak_bytes),
        }
        for choice in found.choices
    ]
    table = Table(
        f"Plans for {len(layers)} layers on {options.ranks} ranks, {options.batch} samples a step",
        ("schedule", "M", "stages\na rank", "seconds\na step", "bubble", "bytes\nat most", "layers of\neach stage"),
        [
            (
                choice["schedule"],
                choice["num_microbatches"],
                choice["stages_per_rank"],
                f"{choice['seconds']:.4g}",
                f"{choice['bubble']:.1%}",
                _bytes(max(choice["peak_bytes"])),
                _layers(choice["cuts"], len(layers)),
            )
            for choice in choices
        ],
    )
    return Report({"choices": choices}, (table,), lambda width: [timeline.to_text(width)])


def _layers(cuts: Sequence[int], num_layers: int) -> str:
    """How many layers each stage has, in short where all have as many."""
    counts = [end - start for start, end in itertools.pairwise((*cuts, num_layers))]
    return f"{counts[0]} each" if len(set(counts)) == 1 else " ".join(map(str, counts))


def _prove(options: argparse.Namespace) -> Report:
    plan = _read_plan(options.file)
    rules = Rules(tagged=options.tagged, rendezvous=not options.buffered)
    proof = prove(plan, rules, channels=options.channels)
    bounds = attrs.asdict(proof)
    names = ("activations", "receives", "sends", "gathered stages", "messages sent")
    order = "tagged messages" if rules.tagged else f"first in, first out, {options.channels} channels"
    how = f"{order}, {'rendezvous' if rules.rendezvous else 'buffered sends'}"
    table = Table(
        f"{plan.schedule.name} is proved for {how}; each rank at most:",
        ("rank", *names),
        [(rank, *row) for rank, row in enumerate(zip(*bounds.values(), strict=True))],
    )
    data = {
        "schedule": plan.schedule.name,
        "num_ranks": len(plan.actions),
        "num_stages": plan.placement.num_stages,
        "num_microbatches": plan.num_microbatches,
        "rules": attrs.asdict(rules),
        "channels": options.channels,
        **{name: list(values) for name, values in bounds.items()},
    }
    return Report(data, (table,))


def _timeline(options: argparse.Namespace) -> Report:
    timelines: list[Timeline] = []
    for file in options.files:
        if file.suffix == ".json":
            found = from_perfetto(file)
            if not found:
                raise PipelineError(f"{file} is a trace without a timeline: nothing was done in it")
            timelines += found
        else:
            plan = _read_plan(file)
            prove(plan, Rules(tagged=True, rendezvous=False))  # what no transport can carry out is not drawn either
            costs = Costs.uniform(
                plan.placement.num_stages, forward=options.forward, backward=options.backward, latency=options.latency
            )
            costs = attrs.evolve(costs, overlap_gain=options.overlap_gain)
            timelines.append(simulate(plan, costs).timeline)
    _draw(timelines, options.picture)
    data = {
        "timelines": [
            {
                "name": timeline.name,
                "num_ranks": timeline.num_ranks,
                "seconds": timeline.makespan,
                "bubble": timeline.bubble,
                "bubble_per_rank": [timeline.bubble_of(rank) for rank in range(timeline.num_ranks)],
            }
            for timeline in timelines
        ]
    }
    return Report(data, texts=lambda width: [timeline.to_text(width) for timeline in timelines])


def _read_plan(file: Path) -> Plan:
    item = from_csv(file)
    return item if isinstance(item, Plan) else lower(item)


def _draw(timelines: Iterable[Timeline], file: Path | None) -> None:
    if file is None:
        return
    if file.suffix == ".svg":
        to_svg(*timelines, path=file)
    elif file.suffix == ".png":
        to_png(*timelines, path=file)
    else:
        to_perfetto(*timelines, path=file)


def _target(text: str) -> Path:
    """A file to write; known to be possible before anything is worked out for it."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{file} may not be written")
    return file


def _picture(text: str) -> Path:
    file = _target(text)
    if file.suffix not in (".svg", ".png", ".json"):
        raise argparse.ArgumentTypeError(f"a picture is an .svg, .png or .json (Perfetto) file, got {file.name}")
    if file.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            ".png is drawn by matplotlib, which is not installed: pip install 'stepwell[plot]', or name an .svg file"
        )
    return file


def _read_costs(file: Path) -> tuple[list[Layer], Costs]:
    try:
        content = json.loads(file.read_text())
        layers: list[Layer] = []
        for entry in content.pop("layers"):
            count = entry.pop("count", 1)
            if count not in range(1, MOST_LAYERS + 1):
                raise ValueError(f"count is a whole number from 1 to {MOST_LAYERS}, got {count!r}")
            layers += [Layer(**entry)] * int(count)
        edges = [EdgeCost(**edge) for edge in content.pop("edges", ())]
        beyond = next((key for key in content if key not in OF_THE_NETWORK), None)
        if beyond is not None:
            raise ValueError(f"there is no {beyond!r} beside layers, edges, {', '.join(OF_THE_NETWORK)}")
        network = attrs.evolve(Costs.uniform(1), edges=edges, **content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PipelineError(
            f"{file} is no file of costs ({type(error).__name__}: {error}); see stepwell plan --help"
        ) from None
    return layers, network


_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def _size(text: str) -> int:
    number = text.rstrip("BKMGTibkmgt ")
    unit = text[len(number) :].strip().upper()
    if unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 40GiB or 8e9")
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):  # of infinity
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 40GiB or 8e9") from None
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than nothing")
    return size


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; write for example 8,16") from None


def _bytes(number: int) -> str:
    value, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
