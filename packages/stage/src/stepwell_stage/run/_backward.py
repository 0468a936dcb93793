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
path. W asks these nodes, one by one, for what is off the path alone, and lets the engine carry that on to the weights. A linear
layer's or a convolution's two products are then computed one in I and the other in W. (W could also start the engine at each of
these nodes with the weights as the wanted leaves; but the engine looks at all that is below where it starts, the path too, so
the time of a stage would grow with the square of its layers.)

*What cannot.* A node is split in that way only if it is known to compute what is asked of it and no more, whichever it is asked
for (a list in ``_divide.py``). Everything else that stands on the path runs whole in I, once, and what it gives to weights is
accumulated there: an ``autograd.Function``, whose backward might do anything; fused kernels that make all gradients at once; a
node whose saved tensors have hooks, since unpacking may recompute (``checkpoint(use_reentrant=False)``) or copy them; one whose
results have hooks (``Node.register_hook``), which only the engine calls. The
same holds for weights that several nodes of the path use, and for what lies between these and the path.

*What must stay whole.* Some functions demand a backward that is restricted to nothing or keeps nothing
(``checkpoint(use_reentrant=True)``, ``torch.compile``). Where one stands in the graph, I runs everything. Where no input needs a
gradient (the first stage, or one behind frozen stages) I runs nothing, and W is a whole backward.

Weights' gradients go through the engine's own accumulation in either part, so hooks on them run as in one backward; and so do
hooks on values between outputs and inputs.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, for the split; the rules above are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .._compat import run_backward, tree_flatten
from ..exceptions import StageUsageError
from ._divide import Divisions, Walk

Grads: TypeAlias = tuple[torch.Tensor | None, ...]


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
    """A part of a backward still to be run.

    Attributes:
        node: the node that an earlier part passed and that is to be asked for its other results; None: there was none.
        grads: the gradients that arrived at it; of roots their own.
        places: which of its results are wanted.
        roots: where the engine starts with these, or where there is no node, with the gradients.
        leaves: which leaves it makes gradients for; None for all.
    """

    node: Node | None
    grads: Sequence[torch.Tensor | None]
    places: Sequence[int]
    roots: Sequence[torch.Tensor | GradientEdge]
    leaves: Sequence[GradientEdge] | None = None


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
    divisions: Divisions | None = None,
    unsplit: Callable[[str], None] | None = None,
) -> tuple[Grads, list[Deferred]]:
    """See :func:`stage_backward_input`.

    Args:
        roots: where to start.
        grads: their gradients.
        inputs: the stage's inputs.
        divisions: what is known of the stage's graphs, where it is kept.
        unsplit: told of the node that makes everything run now, where there is one.
    """
    walk = Walk([_node_of(root) for root in roots], {id(value) for value in inputs if _wants_grad(value)})
    division = (divisions or Divisions()).of(walk)
    if not division.inputs:
        return _take_grads(inputs), [Deferred(None, grads, (), roots)] if roots else []
    if division.must_stay_whole is not None:
        if unsplit is not None:
            unsplit(division.must_stay_whole)
        return run_whole(roots, grads, inputs), []
    nodes = walk.nodes
    taps = [_Tap() for _ in division.later]
    hooks = [nodes[later.node].register_prehook(tap) for later, tap in zip(division.later, taps, strict=True)]
    wanted = [GradientEdge(nodes[leaf], 0) for leaf in (*division.inputs, *division.now)]
    run_backward(roots, grads, leaves=wanted, keep_graph=bool(division.later or division.apart))
    deferred = []
    if division.apart_leaves:
        chosen = [(roots[at], grads[at]) for at in division.apart]
        leaves = [GradientEdge(nodes[leaf], 0) for leaf in division.apart_leaves]
        deferred.append(Deferred(None, [grad for _, grad in chosen], (), [root for root, _ in chosen], leaves))
    for later, tap, hook in zip(division.later, taps, hooks, strict=True):
        hook.remove()
        if tap.grads is not None:
            deferred.append(
                Deferred(
                    nodes[later.node],
                    tap.grads,
                    [place for place, _, _ in later.sides],
                    [GradientEdge(nodes[child], at) for _, child, at in later.sides],
                    [GradientEdge(nodes[leaf], 0) for leaf in later.leaves],
                )
            )
    return _take_grads(inputs), deferred


def run_deferred(deferred: list[Deferred], ask: Ask | None = None) -> None:
    """Run all that is left and forget it, so that memory is freed on the way.

    Args:
        deferred: what is left.
        ask: what asks nodes, where it is kept.
    """
    ask = ask or Ask()
    while deferred:
        part = deferred.pop()
        roots, grads = part.roots, part.grads
        if part.node is not None:
            found = ask(part.node, grads, roots)
            pairs = [(root, found[at]) for root, at in zip(roots, part.places, strict=True) if found[at] is not None]
            roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
        if roots:
            run_backward(roots, grads, leaves=part.leaves)


def _node_of(root: torch.Tensor) -> Node:
    return root.grad_fn or get_gradient_edge(root).node


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
    """A prehook of a node: notes the gradients that arrive, as the value's own hooks left them.

    Holds no node: a node holds its hooks, and such a circle is not seen by the collector of cycles.
    """

    def __init__(self) -> None:
        self.grads: Grads | None = None

    def __call__(self, grads: Grads) -> None:
        self.grads = grads


class _Question:
    """A hook that calls a node. Mutable: which, changes."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.grads: Sequence[torch.Tensor | None] = ()
        self.found: Any = None

    def __call__(self, _: torch.Tensor) -> None:
        assert self.node is not None
        self.found = self.node(*self.grads)  # type: ignore[operator]  # which it is, see torch.autograd.graph.Node


class Ask:
    """Asks nodes for some of their results; mutable, and used by one thread.

    A node that is called computes only what the backward that is under way wants. So one is begun, at a tensor that nothing else
    uses, which wants just these results and does not reach them; and the node is called within it, from a hook.
    """

    def __init__(self) -> None:
        with torch.inference_mode(mode=False):
            self._start = torch.zeros((), device="cpu", requires_grad=True)
            self._gradient = torch.ones((), device="cpu")
        self._question = _Question()
        self._start.register_hook(self._question)  # type: ignore[no-untyped-call]

    def __call__(
        self, node: Node, grads: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | GradientEdge]
    ) -> Grads:
        """All results of a node, but of those that are not wanted None."""
        question = self._question
        question.node, question.grads = node, grads
        try:
            run_backward((self._start,), (self._gradient,), leaves=wanted)
            return question.found if isinstance(question.found, tuple) else (question.found,)
        finally:
            question.node, question.grads, question.found = None, (), None
