"""To which stage of a pipeline each node of a graph belongs.

A node inside a module that a stage owns belongs to that stage. Glue (root-level code: residuals between blocks, the loss)
follows its consumers in forward: it goes to the earliest stage that reads it; in backward it stays with the gradient that it
continues. Forward values only flow to later stages, gradients only to earlier ones; what contradicts that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx, nn

from ._graph import JointGraph, is_getitem, is_view, mutated_arguments, phase_of, positions
from ._memory import memory_roots
from ._plan import ParallelPlan, ancestors
from .exceptions import SplitError


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a row of costs into consecutive parts with the smallest possible largest sum; for each item its part.

    Raises:
        SplitError: there are fewer items than parts.
    """
    if len(costs) < parts:
        raise SplitError(f"{len(costs)} blocks cannot be cut into {parts} stages; use at most {len(costs)}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[float("inf")] * (len(costs) + 1) for _ in range(parts + 1)]
    cut = [[0] * (len(costs) + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, len(costs) - (parts - part) + 1):
            for start in range(part - 1, end):
                worst = max(best[part - 1][start], total[end] - total[start])
                if worst < best[part][end]:
                    best[part][end], cut[part][end] = worst, start
    owner: list[int] = []
    end = len(costs)
    for part in range(parts, 0, -1):
        owner = [part - 1] * (end - cut[part][end]) + owner
        end = cut[part][end]
    return owner


def automatic_owners(
    model: nn.Module, stages: int, *, by: str = "count", cost: Callable[[str], float] | None = None
) -> dict[str, int]:
    """Stages for the children of the largest block container (a ModuleList or Sequential).

    Args:
        model: the model.
        stages: how many.
        by: ``count`` or ``parameters``; with ``cost`` neither is used.
        cost: measured cost of a block by its name.

    Raises:
        SplitError: there is no container, it has too few blocks, or ``by`` is unknown.
    """
    containers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    if not containers:
        raise SplitError(
            "the model has no ModuleList or Sequential to cut; name the stages with ParallelPlan().stage(...)"
        )
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in containers}
    name, container = max(containers, key=lambda item: (sizes[item[0]], len(item[1]), -len(item[0])))
    blocks = [f"{name}.{child}" if name else child for child, _ in container.named_children()]
    if cost is not None:
        weights = [float(cost(block)) for block in blocks]
    elif by == "count":
        weights = [1.0] * len(blocks)
    elif by == "parameters":
        weights = [float(sum(p.numel() for p in block.parameters())) for block in container.children()]
    else:
        raise SplitError(f"split by 'count' or 'parameters', or give a cost; got {by!r}")
    return dict(zip(blocks, balance(weights, stages), strict=True))


def planned_owners(model: nn.Module, plan: ParallelPlan) -> dict[str, int]:
    """Stages by the patterns of a plan."""
    if not plan.stages:
        raise SplitError("the plan names no stages; add ParallelPlan().stage(0, ...).stage(1, ...)")
    return plan.resolve_stages([name for name, _ in model.named_modules()])


def assign(joint: JointGraph, owners: Mapping[str, int]) -> dict[fx.Node, int]:
    """The stage of each node that computes.

    Raises:
        SplitError: a value would flow against the pipeline, or a stage writes to memory of another.
    """
    last = max(owners.values())
    stage: dict[fx.Node, int] = {}
    for node in joint.graph.nodes:
        if node.op == "call_function":
            found = [owners[name] for name in ancestors(node.meta.get("fqn", "")) if name in owners]
            if found:
                stage[node] = found[0]
    forward = [n for n in joint.graph.nodes if n.op == "call_function" and phase_of(n) == "forward"]
    backward = [n for n in joint.graph.nodes if n.op == "call_function" and phase_of(n) == "backward"]
    _follow_consumers(forward, stage)
    _stay_with_gradients(backward, stage, last)
    for node in stage:
        if is_getitem(node):  # only single values cross
            stage[node] = stage[node.all_input_nodes[0]]
    _check(joint, stage)
    return stage


def _follow_consumers(nodes: Sequence[fx.Node], stage: dict[fx.Node, int]) -> None:
    """Forward glue goes to its earliest reader, or, where only glue reads it, to what it reads."""
    glue = [node for node in nodes if node not in stage]

    def by_readers() -> None:
        for node in reversed(glue):
            readers = [stage[user] for user in node.users if user in stage and phase_of(user) == "forward"]
            if readers and node not in stage:
                stage[node] = min(readers)

    by_readers()
    for node in glue:  # the loss and what leads to it
        if node not in stage and (sources := _stages_of(node, stage, "forward")):
            stage[node] = max(sources)
    by_readers()  # what only that reads, and reads nothing itself: a view of a parameter
    for node in glue:
        stage[node] = max([stage.get(node, 0), *_stages_of(node, stage, "forward")])


def _stay_with_gradients(nodes: Sequence[fx.Node], stage: dict[fx.Node, int], last: int) -> None:
    """Backward glue stays with the gradient that it continues.

    A sum of gradients from several stages is the gradient of one value that they all read: it goes to the sum's readers.
    """
    sums = []
    for node in nodes:
        if node.target is torch.ops.aten.add.Tensor and len(set(_stages_of(node, stage, "backward"))) > 1:
            stage.pop(node, None)
            sums.append(node)
        elif node not in stage:
            values, gradients = _stages_of(node, stage, "forward"), _stages_of(node, stage, "backward")
            stage[node] = min(gradients) if gradients else max(values, default=last)
    for node in reversed(sums):
        readers = [stage[user] for user in node.users if user in stage]
        stage[node] = max(readers, default=last)
    for node in nodes:
        stage[node] = min([stage[node], *_stages_of(node, stage, "backward")])


def _stages_of(node: fx.Node, stage: Mapping[fx.Node, int], phase: str) -> list[int]:
    """The stages of what a node reads from one phase."""
    return [stage[s] for s in node.all_input_nodes if s in stage and phase_of(s) == phase]


def _check(joint: JointGraph, stage: Mapping[fx.Node, int]) -> None:
    roots = memory_roots(joint.graph)
    for node, own in stage.items():
        for source in node.all_input_nodes:
            if source not in stage or phase_of(source) != phase_of(node):
                continue
            against = stage[source] > own if phase_of(node) == "forward" else stage[source] < own
            if against:
                raise SplitError(
                    f"in {phase_of(node)} {source} of stage {stage[source]} ({source.meta['fqn']}) is read by {node} of stage"
                    f" {own} ({node.meta['fqn']}): put both modules into one stage, or order the stages as data flows"
                )
        for written in mutated_arguments(node):
            for root in roots[written]:
                if stage.get(root, own) != own:
                    raise SplitError(
                        f"{node.target} of stage {own} ({node.meta['fqn']}) writes to memory of stage {stage[root]}"
                        f" ({root.meta['fqn']}); a value must not be written in place behind a cut"
                    )


def check_writes(joint: JointGraph, part: Mapping[fx.Node, int]) -> None:
    """Refuse parts of which one writes to memory that another reads, where running one after the other swaps the two.

    Args:
        joint: the graph.
        part: for each node that computes the number of its part; parts run in the order of their numbers.

    Raises:
        SplitError: names both.
    """
    roots, position = memory_roots(joint.graph), positions(joint.graph)
    writes = [(node, root) for node in part for written in mutated_arguments(node) for root in roots[written]]
    if not writes:
        return
    readers: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in part:
        for source in () if is_view(node) else node.all_input_nodes:
            for root in roots[source]:
                readers.setdefault(root, {})[node] = None
    for node, root in writes:
        for reader in readers[root]:
            if part[reader] != part[node] and (part[reader] < part[node]) != (position[reader] < position[node]):
                raise SplitError(
                    f"{node.target} ({node.meta['fqn'] or 'train_fn'}) writes to {root}, which {reader} ({reader.meta['fqn']})"
                    f" {'then' if position[reader] > position[node] else 'before that'} reads; run in parts, it would see the"
                    " other value: a value must not be written in place across a cut"
                )
