"""Runs passes in order on a copy of a graph, and checks what each of them left."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence

import attrs

from ._collectives import collective_bytes, starts
from ._graph import JointGraph, remove_dead
from ._lint import lint
from ._memory import Peak, estimate_peak
from ._pass import GraphPass, PassContext
from .exceptions import LintError, PassError, PipelineOrderError


@attrs.frozen
class PassReport:
    """What one pass did.

    Attributes:
        name: name of the pass.
        nodes: number of nodes afterwards.
        collectives: number of collectives afterwards.
        bytes: what one rank contributes to them, in bytes.
        peak: estimated peak memory afterwards.
        seconds: how long it took.
        diff: changes of the graph's text; empty unless asked for.
    """

    name: str
    nodes: int
    collectives: int
    bytes: int
    peak: Peak
    seconds: float
    diff: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.nodes} nodes, {self.collectives} collectives of {self.bytes} bytes,"
            f" estimated peak {self.peak.bytes} bytes at {self.peak.node}, {self.seconds:.2f} s"
        )


class PassPipeline:
    """Passes in an order that their contracts allow.

    Args:
        passes: in order.
        initial: facts that hold before the first.

    Raises:
        PipelineOrderError: a pass needs what none before it provides, or conflicts with one before it.
    """

    def __init__(self, passes: Sequence[GraphPass], *, initial: frozenset[str] = frozenset()) -> None:
        facts, source = initial, dict.fromkeys(initial, "the graph")
        for item in passes:
            contract = item.contract
            if missing := sorted(contract.requires - facts):
                later = [p.name for p in passes if set(missing) <= p.contract.provides]
                advice = f"; put {later[0]} before it" if later else ""
                raise PipelineOrderError(
                    f"pass {item.name} requires {', '.join(missing)}, which no pass before it provides{advice}"
                )
            if clash := sorted(contract.conflicts & facts):
                raise PipelineOrderError(
                    f"pass {item.name} cannot run after {source[clash[0]]}, which provides {', '.join(clash)}"
                )
            facts |= contract.provides
            source |= dict.fromkeys(contract.provides, f"pass {item.name}")
        self.passes = tuple(passes)

    @property
    def changes_numerics(self) -> tuple[str, ...]:
        """Names of the passes after which results may differ in more than the order of sums."""
        return tuple(item.name for item in self.passes if item.contract.changes_numerics)

    def run(
        self, joint: JointGraph, context: PassContext, *, reports: list[PassReport] | None = None, diffs: bool = False
    ) -> JointGraph:
        """A new graph; the one that came in stays as it is, whatever happens.

        Args:
            joint: a graph.
            context: what passes may look at.
            reports: gets one report a pass.
            diffs: whether reports hold text differences.

        Raises:
            PassError: a pass failed, or left a graph that breaks a rule; the cause is chained.
        """
        work = joint.copy()
        before = str(work.graph) if diffs else ""
        for item in self.passes:
            start = time.perf_counter()
            try:
                item.run(work, context)
                work.facts |= item.contract.provides
                remove_dead(work.graph)
                lint(work)
            except LintError as error:
                raise PassError(f"pass {item.name} left a wrong graph: {error}", pass_name=item.name) from error
            except Exception as error:
                raise PassError(
                    f"pass {item.name} failed: {type(error).__name__}: {error}", pass_name=item.name
                ) from error
            if reports is not None:
                after = str(work.graph) if diffs else ""
                reports.append(_report(item, work, time.perf_counter() - start, before, after))
                before = after
        return work


def _report(item: GraphPass, joint: JointGraph, seconds: float, before: str, after: str) -> PassReport:
    nodes = starts(joint.graph)
    diff = "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=1))
    return PassReport(
        name=item.name,
        nodes=len(joint.graph.nodes),
        collectives=len(nodes),
        bytes=sum(map(collective_bytes, nodes)),
        peak=estimate_peak(joint),
        seconds=seconds,
        diff=diff,
    )
