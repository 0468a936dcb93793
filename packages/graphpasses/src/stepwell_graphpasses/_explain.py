"""What was done, and why, for a person."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepwell_mesh import DataParallelTopology

from ._collectives import collective_bytes, starts
from ._config import PassConfig
from ._graph import JointGraph
from ._memory import estimate_peak
from ._pipeline import PassReport
from ._plan import find_owner
from ._table import Layout
from .exceptions import PlanError


def explain(notes: Sequence[tuple[str, str]], subject: str | None) -> str:
    """The notes of the passes, one a line, about everything or about what a pattern names.

    Raises:
        PlanError: there is nothing to say about the subject.
    """
    named = re.compile(rf"(?<![\w.]){re.escape(subject or '')}(?!\w)")  # layers.1, but not layers.10
    chosen = [
        f"{name}: {text}"
        for name, text in notes
        if subject is None or find_owner(subject, name) is not None or named.search(text)
    ]
    if subject is not None and not chosen:
        known = sorted({name for name, _ in notes})
        raise PlanError(
            f"nothing was noted about {subject!r}; there are notes about {', '.join(known[:10])}", pattern=subject
        )
    return "\n".join(dict.fromkeys(chosen))


def describe(
    config: PassConfig,
    topology: DataParallelTopology | None,
    layouts: Mapping[str, Layout],
    joint: JointGraph | None,
    reports: Sequence[PassReport],
    stats: Any,
) -> str:
    """A summary of a compiler."""
    if topology is None:
        lines = [f"{config.dp_mode} on one rank: no collectives"]
    else:
        degrees = topology.degrees
        lines = [f"{config.dp_mode}: {degrees.shard} shards x {degrees.replicate} replicas, reduce={config.reduce}"]
    if joint is None:
        return "\n".join([*lines, "not compiled yet"])
    sharded = sum(layout.sharded for layout in layouts.values())
    padded = sum(layout.sharded and layout.padded for layout in layouts.values())
    frozen = sum(not parameter.trainable for parameter in joint.table)
    lines.append(
        f"{len(layouts)} parameters: {sharded} sharded ({padded} unevenly), {len(layouts) - sharded} whole; {frozen} frozen,"
        f" {sum(bool(parameter.aliases) for parameter in joint.table)} tied"
    )
    for kind in ("gather", "reduce_scatter", "all_reduce"):
        nodes = starts(joint.graph, kind)
        if nodes:
            lines.append(f"{len(nodes)} x {kind}, {sum(map(collective_bytes, nodes))} bytes from each rank")
    lines.append(f"{len(joint.graph.nodes)} nodes, estimated peak {estimate_peak(joint).bytes} bytes above the inputs")
    lines.append(f"specialised graphs: {stats.compiled} made, {stats.hits} hits, {stats.fallbacks} fallbacks")
    lines += [str(report) for report in reports]
    return "\n".join(lines)
