"""Which module and which phase each node of a capture belongs to.

While the step is traced, module hooks and autograd hooks say what runs now, and nodes that were made since they last did get it
written on: nodes cannot be counted, for what only says a size may be taken out of the graph again. A backward node belongs to
the module in whose forward its autograd node was made, which the order of creation tells.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from . import _compat as compat
from .exceptions import CaptureError


class Scopes:
    """Marks of one capture; mutable because it is a log.

    Attributes:
        in_backward: whether backward has begun.
        recomputed: whether a module ran again during backward otherwise than by torch's activation checkpointing.
    """

    def __init__(self) -> None:
        self.in_backward = False
        self.recomputed = False
        self._stack = [""]
        self._runs: tuple[tuple[int, int], ...] = ()
        self._regions: dict[Any, Iterator[int]] = {}
        self._now: dict[str, Any] = {"fqn": "", "phase": "forward", "runs": ()}
        self._autograd_marks: list[tuple[int, str]] = [(-1, "")]

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of all modules, and the runs of checkpointed regions."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True))
            handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            with compat.watch_checkpoints(self._enter_region, self._leave_region):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def start_backward(self, roots: Sequence[torch.Tensor]) -> None:
        """Follow the autograd nodes behind ``roots`` from here on.

        Raises:
            CaptureError: one of them takes gradients of its own, which go past the step's.
        """
        self.in_backward = True
        self._mark()
        seen: set[Any] = set()
        waiting = [root.grad_fn for root in roots]
        owners = _Steps(self._autograd_marks)
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            number = compat.sequence_number(node)
            if node.name() == "CheckpointFunctionBackward":  # of a public function, whose other way works
                where = owners.at(number) if number is not None else ""
                raise CaptureError(
                    f"activation checkpointing in {where or 'train_fn'} has use_reentrant=True: it takes gradients of its own,"
                    " which a capture does not see; call checkpoint with use_reentrant=False"
                )
            if number is not None:
                node.register_prehook(functools.partial(_ignoring_gradients, self._jump, owners.at(number)))

    def annotate(self, graph: fx.Graph) -> None:
        """Write ``fqn``, ``phase`` and ``runs`` (region and number of the run, outermost first) to every node."""
        self._write(graph)
        graph.output_node().meta["fqn"] = ""

    def _enter(self, name: str) -> None:
        self.recomputed |= self.in_backward and not self._runs
        self._stack.append(name)
        self._mark()

    def _leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _enter_region(self, region: Any) -> None:
        if compat.current_graph() is not None:  # another thread's otherwise
            numbers = self._regions.setdefault(region, itertools.count())
            self._runs += ((list(self._regions).index(region), next(numbers)),)
            self._mark()

    def _leave_region(self) -> None:
        if compat.current_graph() is not None:
            self._runs = self._runs[:-1]
            self._mark()

    def _jump(self, name: str) -> None:
        self._stack = [name]
        self._mark()

    def _mark(self) -> None:
        graph = compat.current_graph()
        if graph is not None:
            self._write(graph)
        phase = "backward" if self.in_backward else "forward"
        self._now = {"fqn": self._stack[-1], "phase": phase, "runs": self._runs}
        number = compat.next_sequence_number()
        if number is not None and not self.in_backward:
            self._autograd_marks.append((number, self._stack[-1]))

    def _write(self, graph: fx.Graph) -> None:
        """What runs now made the latest nodes."""
        for node in reversed(graph.nodes):
            if "phase" in node.meta:
                return
            node.meta |= self._now


def _ignoring_gradients(jump: Callable[[str], None], name: str, _: Any) -> None:
    jump(name)


class _Steps:
    """A step function from marks: the last value at or before a position."""

    def __init__(self, marks: list[tuple[int, str]]) -> None:
        self._starts = [start for start, _ in marks]
        self._names = [name for _, name in marks]

    def at(self, position: int) -> str:
        return self._names[bisect.bisect_right(self._starts, position) - 1]


def adopt_owners(graph: fx.Graph) -> None:
    """Where torch does not number autograd nodes: a backward node belongs where the forward value that it reads does."""
    if compat.next_sequence_number() is not None:
        return
    for node in graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "backward" or node.meta["fqn"]:
            continue
        inputs = [n for n in node.all_input_nodes if n.meta.get("fqn")]
        forward = [n for n in inputs if n.meta["phase"] == "forward"]
        if forward or inputs:
            node.meta["fqn"] = (forward or inputs)[-1].meta["fqn"]
