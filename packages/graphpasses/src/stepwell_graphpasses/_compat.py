"""Every private torch name this layer uses, with where it was seen and what happens without it.

Seen in torch 2.13. Each name is looked up once, here; nothing else in the layer may import a private name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree  # no public pytree in torch 2.13; needed: nothing works without it
from torch._subclasses.fake_tensor import FakeTensorMode  # needed: tracing without data
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx  # needed: the capture itself
from torch.fx.experimental.symbolic_shapes import (  # needed: dynamic shapes
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode  # no public name; the memory oracle of `testing` needs it

# The operators that stand for collectives in a graph. Their schemas have not changed since torch 2.3; needed.
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
ALL_GATHER_APART = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_REDUCE_IN_PLACE = torch.ops._c10d_functional.all_reduce_.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
ALL_GATHER_OUT = torch.ops._c10d_functional.all_gather_into_tensor_out.default  # only torch's bucketing writes it
ALL_REDUCE_APART = torch.ops._c10d_functional.all_reduce_coalesced_.default

# Operators with an underscore in their names that a capture is full of. Named like that since torch 1.x; needed.
CAST = torch.ops.aten._to_copy.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

__all__ = [
    "ALL_GATHER",
    "ALL_GATHER_APART",
    "ALL_GATHER_OUT",
    "ALL_REDUCE",
    "ALL_REDUCE_APART",
    "ALL_REDUCE_IN_PLACE",
    "CAST",
    "REDUCE_SCATTER",
    "UNSAFE_VIEW",
    "WAIT",
    "ExampleMode",
    "ShapeEnv",
    "TorchDispatchMode",
    "alive",
    "below_autograd",
    "current_graph",
    "direct_call",
    "dtensor_like",
    "enable_python_dispatcher",
    "fake_store",
    "flatten_named",
    "is_functional_collective",
    "local_part",
    "make_fx",
    "next_sequence_number",
    "pytree",
    "resolve_group",
    "sequence_number",
    "strided_shard",
    "symbolic_input",
    "torch_bucketing",
    "torch_overlap",
    "tree_map_tensors",
    "unflatten",
]


class ExampleMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode in which the example values of one capture live.

    Attributes:
        known: answers to questions that passes have asked already; see ``_graph.example``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[Any, Any] = {}


def flatten_named(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Leaves with dotted paths (``batch.tokens``, ``pair.0``), and the structure for :func:`unflatten`."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    named = []
    for path, leaf in leaves:
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        named.append((".".join(parts), leaf))
    return named, spec


def unflatten(leaves: Iterable[Any], spec: Any) -> Any:
    """The tree that :func:`flatten_named` took apart."""
    return pytree.tree_unflatten(list(leaves), spec)


def tree_map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with each tensor replaced."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


def current_graph() -> torch.fx.Graph | None:
    """The graph that make_fx is writing now; None (nodes then get no module names) where torch does not say."""
    try:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        return None if mode is None else mode.tracer.graph
    except (ImportError, AttributeError):
        return None


def next_sequence_number() -> int | None:
    """The number that the next autograd node will get; None (backward nodes then get their module by data flow) without it."""
    try:
        return int(torch._C._autograd._get_sequence_nr())
    except AttributeError:
        return None


def sequence_number(node: Any) -> int | None:
    """The creation number of an autograd node; None where torch does not say."""
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


def enable_python_dispatcher() -> AbstractContextManager[Any]:
    """What symbolic shapes need inside composite operators; without it some operators lose their symbols, and say so."""
    try:
        from torch._dispatch.python import enable_python_dispatcher as enable
    except ImportError:
        return nullcontext()
    return enable()


def symbolic_input(mode: ExampleMode, tensor: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """A fake of ``tensor`` whose sizes in ``dims`` are symbols."""
    dynamic = set(dims)
    sizes = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def resolve_group(name: str) -> Any:
    """The process group registered under a name; raises RuntimeError for a free one. Needed only to name its members."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def strided_shard(dim: int, split_factor: int) -> Any:
    """How DTensor says "sharded by a left axis after a right one was"; raises ImportError where torch lost the name."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def direct_call(target: Callable[..., Any]) -> Callable[..., Any]:
    """An operator without the Python frame that torch.ops puts around it; the operator itself where torch has no such thing."""
    inner = getattr(target, "_op", None)
    return inner if callable(inner) else target


def below_autograd() -> AbstractContextManager[Any]:
    """No operator asks autograd whether to record anything; without the name, each asks and is told no."""
    guard = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
    return nullcontext() if guard is None else guard()


def dtensor_like(local: torch.Tensor, tensor: DTensor) -> DTensor:
    """A DTensor laid out as another one, around another local tensor."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_part(tensor: DTensor) -> torch.Tensor:
    """A DTensor's local tensor itself; a view of it where torch no longer has the attribute."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return local
    with torch.no_grad():
        return tensor.to_local()


def alive(storage: torch.UntypedStorage) -> Callable[[], bool]:
    """Tells later whether a storage is still held by anybody, without holding it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    return lambda: not reference.expired()  # type: ignore[no-untyped-call]


def fake_store() -> Any:
    """The store of torch's "fake" backend; only for tests, which raise ImportError without it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def is_functional_collective(target: Any) -> bool:
    """Whether an operator starts communication (the wait for it does not)."""
    namespace = getattr(target, "namespace", None)
    return namespace in ("_c10d_functional", "_c10d_functional_autograd") and target is not WAIT


def torch_bucketing() -> ModuleType:
    """What torch plans buckets with, and what merges them. Seen in 2.13; raises ImportError where any of the names is missing."""
    return _passes_of_torch(
        "bucketing",
        "greedy_bucket_collective_by_mb",
        "merge_all_gather_bucket",
        "merge_reduce_scatter_bucket",
        "merge_all_reduce_bucket",
    )


def torch_overlap() -> Callable[..., None]:
    """What torch schedules overlap with. Seen in 2.13; raises ImportError without it."""
    module = _passes_of_torch("overlap_scheduling", "schedule_overlap_bucketing")

    def schedule(graph: Any, **options: Any) -> None:
        module.schedule_overlap_bucketing(graph, **options)
        # It looks names of groups up through a cache without end, which would keep every graph alive.
        getattr(getattr(module, "get_group_name", None), "cache_clear", lambda: None)()

    return schedule


def _passes_of_torch(name: str, *needed: str) -> ModuleType:
    module = importlib.import_module(f"torch._inductor.fx_passes.{name}")
    if missing := [one for one in needed if not hasattr(module, one)]:
        raise ImportError(f"{module.__name__} has no {', '.join(missing)}")
    return module
