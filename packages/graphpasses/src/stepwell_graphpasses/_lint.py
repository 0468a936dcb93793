"""The rules that every graph must keep, whatever passes have done to it."""

from __future__ import annotations

from collections import Counter

from torch import fx

from . import _compat as compat
from ._collectives import comm_of, is_start, results_of, waits_of
from ._graph import JointGraph, is_getitem, is_view, mutated_arguments, phase_of, positions, value_of
from ._memory import memory_roots
from .exceptions import LintError


def lint(joint: JointGraph) -> None:
    """Check every rule.

    Raises:
        LintError: lists all violations.
    """
    problems = find_problems(joint)
    if problems:
        raise LintError("the graph breaks these rules:\n  " + "\n  ".join(problems), problems=problems)


def find_problems(joint: JointGraph) -> list[str]:
    """All violations, in words."""
    try:
        joint.graph.lint()
    except RuntimeError as error:
        return [f"no valid FX graph: {error}"]
    return [
        *_convention(joint),
        *_marks(joint),
        *_waits(joint),
        *_in_flight(joint),
        *_owners(joint),
        *_gradients(joint),
        *_phases(joint),
        *_reshard(joint),
    ]


def _convention(joint: JointGraph) -> list[str]:
    expected = len(joint.table) + len(joint.buffers) + len(joint.guards.tensor_names) + len(joint.extra_inputs)
    problems = []
    if len(joint.placeholders) != expected:
        problems.append(f"{len(joint.placeholders)} inputs, the calling convention has {expected}")
    tensors = sum(value is None for _, value in joint.losses)
    if len(joint.outputs) != 1 + tensors + len(joint.gradients):
        problems.append(
            f"{len(joint.outputs)} outputs, expected the loss, {tensors} named losses and {len(joint.gradients)} gradients"
        )
    return problems


def _marks(joint: JointGraph) -> list[str]:
    return [
        f"{node} has no {mark}"
        for node in joint.graph.nodes
        if node.op in ("placeholder", "call_function")
        for mark in ("val", "fqn", "phase")
        if mark not in node.meta
    ]


def _waits(joint: JointGraph) -> list[str]:
    """Each collective is waited for exactly once, and nothing else reads what it has not yet written."""
    problems = []
    for node in joint.graph.nodes:
        if node.op != "call_function" or not compat.is_functional_collective(node.target):
            continue
        results = results_of(node)
        for result in results:
            waits = [user for user in result.users if user.target is compat.WAIT]
            if len(waits) != 1:
                problems.append(f"{result} ({node.target}) is waited for {len(waits)} times, must be once")
            problems += [f"{user} reads {result} before the wait for it" for user in result.users if user not in waits]
        if results != [node]:
            problems += [f"{user} reads {node} before the wait for it" for user in node.users if user not in results]
    return problems


def _in_flight(joint: JointGraph) -> list[str]:
    """Nobody writes to what a collective still reads, nor reads what one has overwritten by another name."""
    writers = {node: targets for node in joint.graph.nodes if (targets := mutated_arguments(node))}
    collectives = [
        node
        for node in joint.graph.nodes
        if node.op == "call_function" and compat.is_functional_collective(node.target)
    ]
    if not writers or not collectives:
        return []
    position, roots = positions(joint.graph), memory_roots(joint.graph)
    writes: dict[fx.Node, list[fx.Node]] = {}
    for node, targets in writers.items():
        for target in targets:
            for root in roots[target]:
                writes.setdefault(root, []).append(node)
    overwritten = {root for node in collectives for target in writers.get(node, ()) for root in roots[target]}
    readers: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    for node in joint.graph.nodes if overwritten else ():
        for source in node.all_input_nodes:
            for root in overwritten.intersection(roots[source]):
                readers.setdefault(root, []).append((node, source))
    problems: dict[str, None] = {}
    for node in collectives:
        begin, end = position[node], max((position[wait] for wait in waits_of(node)), default=position[node])
        for source in node.all_input_nodes:
            for root in roots[source]:
                for writer in writes.get(root, ()):
                    if begin < position[writer] < end:
                        problems[f"{writer} writes to {source}, which {node} reads until the wait for it"] = None
        for target in writers.get(node, ()):
            for root in roots[target]:
                for reader, source in readers.get(root, ()):
                    if position[source] < begin < position[reader]:
                        problems[f"{reader} reads {source}, which {node} has overwritten by then"] = None
    return list(problems)


def _owners(joint: JointGraph) -> list[str]:
    """Along each group a parameter's gradient is reduced at most once, and only where it is trainable."""
    problems = []
    seen: Counter[tuple[str, str]] = Counter()
    for node in joint.graph.nodes:
        comm = comm_of(node)
        if comm is None or not is_start(node, "reduce_scatter", "all_reduce"):
            continue
        for name in comm.params:
            seen[name, comm.group] += 1
            if not joint.table[name].trainable:
                problems.append(f"{node} reduces a gradient of {name}, which is frozen")
    problems += [
        f"the gradient of {name} is reduced {n} times over {group}" for (name, group), n in seen.items() if n > 1
    ]
    return problems


def _gradients(joint: JointGraph) -> list[str]:
    """Each gradient that goes out is that of its parameter, and is reduced over the same groups as the others."""
    problems = []
    reduced: dict[
        fx.Node, set[tuple[str, str]]
    ] = {}  # the parameters in a value, with each group they are reduced over
    for node in joint.graph.nodes:
        comm = comm_of(node)
        found = {pair for source in node.all_input_nodes for pair in reduced.get(source, ())}
        if comm is not None:
            found = {(name, group) for name, group in found if name in comm.params}
            if is_start(node, "reduce_scatter", "all_reduce"):
                found |= {(name, comm.group) for name in comm.params}
        if found:
            reduced[node] = found
    everywhere = {group for node in joint.gradient_nodes.values() for _, group in reduced.get(node, ())}
    places = joint.parameter_nodes
    for name, node in joint.gradient_nodes.items():
        shape, allowed = tuple(value_of(node).shape), (joint.table[name].shape, tuple(value_of(places[name]).shape))
        if shape not in allowed:
            problems.append(f"the gradient of {name} has shape {shape}, the parameter {joint.table[name].shape}")
        found = reduced.get(node, set())
        if not node.all_input_nodes:  # zeros, for a parameter that the loss does not depend on
            continue
        if found and name not in {other for other, _ in found}:
            others = ", ".join(sorted({other for other, _ in found}))
            problems.append(f"the gradient of {name} is {node}, which was reduced for {others}")
        else:
            missing = sorted(everywhere - {group for other, group in found if other == name})
            problems += [f"the gradient of {name} is not reduced over {group}, as others are" for group in missing]
    return problems


def _phases(joint: JointGraph) -> list[str]:
    return [
        f"{node} belongs to forward and reads {source}, which belongs to backward"
        for node in joint.graph.nodes
        if node.op == "call_function" and phase_of(node) == "forward"
        for source in node.all_input_nodes
        if phase_of(source) == "backward"
    ]


def _reshard(joint: JointGraph) -> list[str]:
    """No value that shares memory with a parameter gathered in forward is read in backward, where it was to be freed."""
    if "resharded" not in joint.facts:
        return []
    problems = []
    gathered: dict[fx.Node, str] = {}
    for node in joint.graph.nodes:
        comm = comm_of(node)
        if comm is not None and comm.kind == "gather" and phase_of(node) == "forward":
            if not joint.kept.issuperset(comm.params):
                gathered[node] = ", ".join(comm.params)
        elif node.op == "call_function":
            shared = node.target is compat.WAIT or is_view(node) or is_getitem(node)
            for source in node.all_input_nodes:
                if source not in gathered:
                    continue
                if phase_of(node) == "backward":
                    problems.append(
                        f"{node} in backward reads {source}, memory of {gathered[source]} gathered in forward"
                    )
                elif shared:
                    gathered[node] = gathered[source]
    return problems
