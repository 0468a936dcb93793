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
        PipelineOrderError: a pass needs what none before it provides, or conflicts with one before it, or is no pass.
    """

    def __init__(self, passes: Sequence[GraphPass], *, initial: frozenset[str] = frozenset()) -> None:
        for index, item in enumerate(passes):
            if isinstance(item, type) or not isinstance(item, GraphPass):
                hint = (
                    f"; write {item.__name__}()" if isinstance(item, type) else ", which has no name, contract or run"
                )
                raise PipelineOrderError(f"passes[{index}] is no pass but {item!r}{hint}")
        self.passes = tuple(passes)
        self._check(initial)
        self._initial = initial

    def _check(self, initial: frozenset[str]) -> None:
        """Hold every contract against what holds before it.

        Raises:
            PipelineOrderError: one of them is not kept.
        """
        passes, facts, source = self.passes, initial, dict.fromkeys(initial, "the graph")
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
                    f"pass {item.name} cannot run after {source[clash[0]]}, which provides {', '.join(clash)};"
                    f" put {item.name} before it, or leave one of them out"
                )
            facts |= contract.provides
            source |= dict.fromkeys(contract.provides, f"pass {item.name}")

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
            PipelineOrderError: other passes have been over the graph before, with which these do not go.
            PassError: a pass failed, or left a graph that breaks a rule; the cause is chained.
        """
        if joint.facts != self._initial:
            self._check(joint.facts)
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
