"""The seam between the pipeline and its passes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import attrs

from stepwell_mesh import DataParallelTopology

from ._config import PassConfig
from ._graph import JointGraph
from ._table import Layout
from ._variants import FULL, Variant
from .exceptions import ConfigError


def _facts(value: Any) -> frozenset[str]:
    if isinstance(value, str):  # whose letters would be taken for facts
        raise ConfigError(
            f"facts are a set of words: write {{{value!r}}}; got {value!r}", field="contract", value=value
        )
    return frozenset(value)


@attrs.frozen
class PassContract:
    """What a pass needs and does. Facts are words such as ``collectives``, ``resharded``, ``bucketed``.

    Attributes:
        requires: facts that must hold before.
        provides: facts that hold afterwards.
        conflicts: facts that must not hold before.
        changes_numerics: whether results may differ, beyond what is asked for, in more than the order of sums.

    Raises:
        ConfigError: one word in place of a set of them.
    """

    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_facts)
    provides: frozenset[str] = attrs.field(default=frozenset(), converter=_facts)
    conflicts: frozenset[str] = attrs.field(default=frozenset(), converter=_facts)
    changes_numerics: bool = False


@attrs.frozen(eq=False)
class PassContext:
    """What passes may look at besides the graph; the same on every rank.

    Attributes:
        config: what the user wants.
        topology: axes and groups of data parallelism; None with one rank.
        layouts: how each parameter lies on the ranks, by canonical name.
        variant: which graph of the trace is being made.
        alone: whether only this rank makes it, for sizes that only this rank has: then a pass must not communicate.
    """

    config: PassConfig
    topology: DataParallelTopology | None
    layouts: dict[str, Layout]
    variant: Variant = FULL
    alone: bool = False


@runtime_checkable
class GraphPass(Protocol):
    """One rewriting of a graph.

    A pass must decide alike on every rank: from names, shapes and the graph's order, never from sets, timing, or what one
    rank alone knows. It works in place on a graph that nobody else holds, keeps the calling convention, and gives every node
    it adds an example value, a module, a phase and a mark.
    """

    @property
    def name(self) -> str:
        """Short name for reports and errors."""
        ...

    @property
    def contract(self) -> PassContract:
        """What it needs and does."""
        ...

    def run(self, joint: JointGraph, context: PassContext) -> None:
        """Rewrite the graph.

        Raises:
            GraphError: it cannot; the graph is then thrown away.
        """
        ...
