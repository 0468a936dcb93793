"""For tests: a world of fake ranks in one process, an oracle of live memory, and a battery for passes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._compat import TorchDispatchMode, alive, fake_store, pytree
from ._compiler import GraphCompiler
from ._config import PassConfig
from ._lint import find_problems
from ._pass import GraphPass
from ._signature import signature
from .passes import default_passes

__all__ = ["LiveBytes", "check_graph_pass", "fake_world"]


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of ``size`` ranks that only pretends to communicate: graphs can be made, results mean nothing.

    Example::

        with fake_world(64):
            GraphCompiler(model, train_fn).compile(**inputs).print_graph()
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that tensors made within it hold, by asking each storage whether it is still alive.

    Example::

        with LiveBytes() as live:
            compiler.forward_backward(**inputs)
        print(live.peak)

    Attributes:
        peak: most bytes alive at once, measured after each operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._made: dict[int, tuple[Callable[[], bool], int]] = {}
        self._given: dict[int, Callable[[], bool]] = {}  # was there before

    @property
    def now(self) -> int:
        """Bytes alive now."""
        self._made = {key: item for key, item in self._made.items() if item[0]()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and count what it made."""
        for storage in _storages((args, kwargs)):
            if not self._is_known(storage):
                self._given[storage._cdata] = alive(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if not self._is_known(storage):
                self._made[storage._cdata] = (alive(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _is_known(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was seen before, and is not a new one at an old one's address."""
        made, given = self._made.get(storage._cdata), self._given.get(storage._cdata)
        return (made is not None and made[0]()) or (given is not None and given())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def check_graph_pass(
    make_pass: Callable[[], GraphPass],
    make_model: Callable[[], nn.Module],
    train_fn: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    config: PassConfig | None = None,
    before: tuple[GraphPass, ...] | None = None,
) -> GraphCompiler:
    """The battery that every pass must stand, on the ranks of the present process group.

    The pass runs at the end of a pipeline, and must keep the calling convention and every rule of a graph, decide alike each time
    and on every rank, keep nothing between graphs, and change neither loss nor gradients by more than rounding.

    Args:
        make_pass: a fresh pass.
        make_model: the same model each time it is called.
        train_fn: the step.
        inputs: this rank's batch.
        config: the configuration; None: the default one.
        before: the passes before it; None: the default ones without those that conflict with it.

    Returns:
        The compiler that ran the pass.

    Raises:
        AssertionError: a rule is broken; says which.
    """
    config = config or PassConfig()
    item = make_pass()
    assert isinstance(item.name, str), f"name must be a string, is {item.name!r}"
    assert item.name, "name must not be empty"
    if before is None:
        gives = {name for p in default_passes(config) for name in p.contract.provides} & item.contract.conflicts
        before = tuple(
            p
            for p in default_passes(config)
            if p.name != item.name and not p.contract.provides & gives and item.name != p.name
        )
    results = []
    for passes in (before, (*before, item), (*before, item), (*before, make_pass())):
        model = make_model()
        compiler = GraphCompiler(model, train_fn, config, passes=passes)
        state = torch.get_rng_state()
        loss, _ = compiler.forward_backward(**inputs)
        torch.set_rng_state(state)
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((compiler, loss, found))
    plain, once, again, fresh = results
    problems = find_problems(once[0].graph())
    assert not problems, f"pass {item.name} leaves a graph that breaks rules: {problems}"
    for other, what in ((again, "used a second time"), (fresh, "made anew")):
        same = str(once[0].graph().graph) == str(other[0].graph().graph)
        assert same, f"pass {item.name}, {what}, gives another graph"
    entries = [entry for entry in signature(once[0].graph()) if entry.params]
    assert all(entry.members for entry in entries), f"pass {item.name} uses a group that is not registered"
    if not item.contract.changes_numerics:
        torch.testing.assert_close(once[1], plain[1], msg=lambda text: f"pass {item.name} changes the loss: {text}")
        assert once[2].keys() == plain[2].keys(), f"pass {item.name} changes which parameters have gradients"
        for name, gradient in once[2].items():
            torch.testing.assert_close(
                _local(gradient), _local(plain[2][name]), msg=functools.partial("gradient of {}: {}".format, name)
            )
    return once[0]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
