"""Backward of one stage, whole or in two parts: first what other stages wait for, later the rest.

A zero-bubble schedule splits the backward of a microbatch: I makes the gradients of the stage's inputs, which the stage before
waits for, and W makes the weights', for which nobody waits. The two together do what one backward does, each thing once.

*What can be deferred.* In the autograd graph between outputs and inputs, the nodes from which an input can be reached form the
path that I must run. Everything else hangs off the path: parameters, and what is computed from parameters alone. The engine,
told which leaves are wanted, runs the nodes that lead to them, and asks each node for those gradients only::

    output ── addmm ── gelu ── addmm ── input          the path
                │                │
              t, bias          t, bias                 off the path
                │                │
              weight           weight

So I runs the path with the inputs as the wanted leaves and notes the gradient that arrives at each node with something off the
path; W starts from these nodes with the weights as the wanted leaves. A linear layer's or a convolution's two products are then
computed one in I and the other in W.

*What cannot.* A node is split in that way only if it is known to compute what is asked of it and no more, whichever it is asked
for (:data:`_SEPARABLE`). Everything else that stands on the path runs whole in I, once, and what it gives to weights is
accumulated there: an ``autograd.Function``, whose backward might do anything; fused kernels that make all gradients at once; a
node whose saved tensors have hooks, since unpacking may recompute (``checkpoint(use_reentrant=False)``) or copy them. The
same holds for weights that several nodes of the path use: W starting from the upper one would run into the lower one.

*What must stay whole.* Some functions demand a backward that is restricted to nothing or keeps nothing
(``checkpoint(use_reentrant=True)``, ``torch.compile``). Where one stands in the graph, I runs everything. Where no input needs a
gradient (the first stage, or one behind frozen stages) I runs nothing, and W is a whole backward.

Weights' gradients go through the engine's own accumulation in either part, so hooks on them run as in one backward. A hook on a
value between outputs and inputs runs once per part if a split node made that value; its result is used as in one backward.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, for the split; the rules above are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from .._compat import has_saved_tensor_hooks, run_backward, tree_flatten
from ..exceptions import StageUsageError

Grads: TypeAlias = tuple[torch.Tensor | None, ...]

# Nodes that compute, of the gradients of their operands, exactly those that are wanted, and share no work between them. (A batch
# or group norm does share: the sums that its input's gradient needs are its weights' gradients.)
_SEPARABLE = frozenset(
    {
        "AddBackward0",
        "AddmmBackward0",
        "BaddbmmBackward0",
        "BmmBackward0",
        "ConvolutionBackward0",
        "ConvolutionOverrideableBackward0",
        "DivBackward0",
        "FusedRmsNormBackward0",
        "GroupedMmBackward0",
        "LinearBackward0",
        "MmBackward0",
        "MulBackward0",
        "NativeLayerNormBackward0",
        "SubBackward0",
    }
)


def stage_backward(stage_output: Any, output_grads: Any, input_values: Iterable[Any]) -> Grads:
    """Accumulate gradients of everything that the outputs depend on, and give those of the inputs.

    Example::

        x = x.detach().requires_grad_()
        (grad_x,) = stage_backward(module(x), grad_y, [x])

    Args:
        stage_output: a tensor or any nesting of values; those that require no grad are passed over.
        output_grads: their gradients in the same structure; None for all, or for one, where it is a scalar with gradient one.
        input_values: the stage's inputs. ``.grad`` of those that require grad is None afterwards.

    Returns:
        For each input its gradient, or None where it needs none or nothing depends on it.

    Raises:
        StageUsageError: outputs and gradients are not equally many.
    """
    return run_whole(*_flat(stage_output, output_grads), tuple(input_values))


def stage_backward_input(
    stage_outputs_or_loss: Any,
    output_grads: Any,
    input_values: Iterable[Any],
    weights: Iterable[torch.Tensor] = (),
) -> tuple[Grads, list[Deferred]]:
    """The first part of a backward: the gradients of the inputs.

    Gradients of weights that come with them at no further cost are accumulated at once; see the module's first lines.

    Example::

        (grad_x,), rest = stage_backward_input(module(x), grad_y, [x])
        stage_backward_weight(module.parameters(), rest)

    Args:
        stage_outputs_or_loss: as ``stage_output`` of :func:`stage_backward`.
        output_grads: as there.
        input_values: as there.
        weights: not needed, since the graph says which weights there are; it is here so that calls written for
            ``torch.distributed.pipelining`` run.

    Returns:
        The gradients as :func:`stage_backward` gives them, and what :func:`stage_backward_weight` needs. The graph lives until
        that has run.
    """
    del weights
    return run_inputs(*_flat(stage_outputs_or_loss, output_grads), tuple(input_values))


def stage_backward_weight(weights: Iterable[torch.Tensor], param_groups: list[Deferred]) -> Grads:
    """The second part of a backward: accumulate the gradients that :func:`stage_backward_input` left.

    Args:
        weights: those whose gradients to return.
        param_groups: what the first part gave; empty afterwards, so that its memory is free.

    Returns:
        For each weight its accumulated gradient, or None.
    """
    run_deferred(param_groups)
    return tuple(weight.grad for weight in weights)


def _flat(outputs: Any, grads: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The outputs that require grad, and their gradients."""
    leaves, _ = tree_flatten(outputs)
    grad_leaves = [None] * len(leaves) if grads is None else tree_flatten(grads)[0]
    if len(grad_leaves) != len(leaves):
        raise StageUsageError(
            f"expected a gradient, or None, for each of {len(leaves)} outputs, got {len(grad_leaves)}"
        )
    pairs = [
        pair
        for pair in zip(leaves, grad_leaves, strict=True)
        if isinstance(pair[0], torch.Tensor) and pair[0].requires_grad
    ]
    return [root for root, _ in pairs], [grad for _, grad in pairs]


# The same on roots that all require grad, as programs call it.


@attrs.frozen(eq=False)
class Deferred:
    """A backward still to be run, from where an earlier part stopped.

    Attributes:
        roots: where it starts.
        grads: the gradient of each root.
        leaves: which leaves it makes gradients for; None for all.
        hook: on the node that the roots belong to, where it has one; see :class:`_Tap`.
    """

    roots: Sequence[torch.Tensor | GradientEdge]
    grads: Sequence[torch.Tensor | None]
    leaves: Sequence[GradientEdge] | None = None
    hook: RemovableHandle | None = None

    def run(self) -> None:
        """Run it, once."""
        torch.autograd.backward(self.roots, self.grads, inputs=self.leaves)  # type: ignore[arg-type]
        if self.hook is not None:
            self.hook.remove()


def run_whole(roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], inputs: Sequence[Any]) -> Grads:
    """See :func:`stage_backward`."""
    if roots:
        run_backward(roots, grads)
    return _take_grads(inputs)


def run_inputs(
    roots: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    inputs: Sequence[Any],
    *,
    unsplit: Callable[[str], None] | None = None,
) -> tuple[Grads, list[Deferred]]:
    """See :func:`stage_backward_input`; ``unsplit`` is told of the node that makes everything run now, where there is one."""
    wanted = [get_gradient_edge(value) for value in inputs if _wants_grad(value)]
    graph = _Graph([get_gradient_edge(root).node for root in roots], {edge.node for edge in wanted})
    if not graph.path:
        return _take_grads(inputs), [Deferred(roots, grads)] if roots else []
    if graph.must_stay_whole is not None:
        if unsplit is not None:
            unsplit(graph.must_stay_whole)
        return run_whole(roots, grads, inputs), []
    now, later = graph.divide()
    taps = {node: _Tap() for node in later if node is not None}
    hooks = {node: node.register_prehook(tap) for node, tap in taps.items()}
    leaves = [edge for edge in wanted if edge.node in graph.path] + [GradientEdge(leaf, 0) for leaf in now]
    torch.autograd.backward(roots, grads, retain_graph=bool(later), inputs=leaves)
    deferred = []
    for node, kept in later.items():
        left = [GradientEdge(leaf, 0) for leaf in kept]
        if node is None:  # outputs that no input reaches
            pairs = [
                pair for pair in zip(roots, grads, strict=True) if get_gradient_edge(pair[0]).node not in graph.path
            ]
            deferred.append(Deferred([root for root, _ in pairs], [grad for _, grad in pairs], left))
        else:
            found = [(i, grad) for i, grad in enumerate(taps[node].grads or ()) if grad is not None]
            if found:
                edges = [GradientEdge(node, i) for i, _ in found]
                deferred.append(Deferred(edges, [grad for _, grad in found], left, hooks[node]))
    return _take_grads(inputs), deferred


def run_deferred(deferred: list[Deferred]) -> None:
    """Run all that is left and forget it, so that memory is freed on the way."""
    while deferred:
        deferred.pop().run()


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _take_grads(inputs: Sequence[Any]) -> Grads:
    found = []
    for value in inputs:
        grad = None
        if _wants_grad(value):
            grad, value.grad = value.grad, None
        found.append(grad)
    return tuple(found)


class _Tap:
    """A prehook of a node: notes the gradients that arrive when I runs it, and repeats them when W does.

    The noted ones are as the value's own hooks left them, and these hooks run again in W: what they return then is not used.
    Holds no node: a node holds its hooks, and such a circle is not seen by the collector of cycles.
    """

    def __init__(self) -> None:
        self.grads: Grads | None = None

    def __call__(self, grads: Grads) -> Grads | None:
        if self.grads is None:
            self.grads = grads
            return None
        return self.grads


class _Graph:
    """The autograd graph below some nodes, seen from the inputs.

    Attributes:
        path: the nodes from which an input is reached, those nearest to the inputs first.
        must_stay_whole: the name of a node that demands a backward that is not split; None where there is none.
    """

    def __init__(self, starts: Sequence[Node], inputs: set[Node]) -> None:
        self.path: dict[Node, None] = {}
        self.must_stay_whole: str | None = None
        self._starts = starts
        self._below: dict[Node, frozenset[Node]] = {}  # of nodes off the path: the leaves they reach
        self._fixed: set[Node] = set()  # leaves whose gradients are made in I
        for node in _children_first(starts):
            name = node.name()
            if "Checkpoint" in name or name.startswith("CompiledFunction"):
                self.must_stay_whole = name
            children = _children(node)
            if node in inputs or any(child in self.path for child in children):
                self.path[node] = None
                continue
            leaves = frozenset[Node]().union(*(self._below[child] for child in children))
            self._below[node] = leaves if children else frozenset((node,))
            if has_saved_tensor_hooks(node):
                self._fixed |= leaves

    def divide(self) -> tuple[set[Node], dict[Node | None, set[Node]]]:
        """The leaves whose gradients I makes, and for each node from which W starts those left to it.

        The node None stands for all outputs from which no input is reached.
        """
        sides: list[tuple[Node | None, Node]] = [
            (node, child) for node in self.path for child in _children(node) if child in self._below
        ]
        sides += [(None, node) for node in self._starts if node in self._below]
        now = set(self._fixed)
        users: dict[Node, Node | None] = {}
        for node, child in sides:
            separable = node is None or (node.name() in _SEPARABLE and not has_saved_tensor_hooks(node))
            for leaf in self._below[child]:
                if not separable or users.setdefault(leaf, node) is not node:
                    now.add(leaf)
        # What lies between the path and leaves runs once: all its leaves in I, or all in W.
        grows = True
        while grows:
            before = len(now)
            for _, child in sides:
                if not self._below[child].isdisjoint(now):
                    now |= self._below[child]
            grows = len(now) > before
        later: dict[Node | None, set[Node]] = {}
        for node, child in sides:
            left = self._below[child] - now
            if left:
                later.setdefault(node, set()).update(left)
        return now, later


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(starts: Sequence[Node]) -> Iterator[Node]:
    """The given nodes and every node below them, each after those below it."""
    seen = set[Node]()
    stack: list[tuple[Node | None, Iterator[Node]]] = [(None, iter(starts))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(_children(child))))
                break
        else:
            stack.pop()
            if node is not None:
                yield node
