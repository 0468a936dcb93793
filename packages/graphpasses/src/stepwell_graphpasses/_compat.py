"""Every private torch name this layer uses, with where it was seen and what happens without it.

Seen in torch 2.13. Each name is looked up once, here; nothing else in the layer may import a private name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree  # no public pytree in torch 2.13; needed: nothing works without it
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # needed: tracing without data
from torch.distributed.tensor import DTensor
from torch.fx.experimental import proxy_tensor  # needed: the capture itself
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

# Operators with an underscore in their names that a capture is full of. Named like that since torch 1.x; needed.
CAST = torch.ops.aten._to_copy.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

__all__ = [
    "ALL_GATHER",
    "ALL_GATHER_APART",
    "ALL_GATHER_OUT",
    "ALL_REDUCE",
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
    "has_gradient_hooks",
    "is_functional_collective",
    "local_part",
    "next_sequence_number",
    "pytree",
    "record",
    "resolve_group",
    "sequence_number",
    "strided_shard",
    "symbolic_input",
    "torch_bucketing",
    "torch_overlap",
    "tree_map_tensors",
    "unflatten",
    "watch_checkpoints",
]


class ExampleMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode in which the example values of one capture live.

    Attributes:
        known: answers to questions that passes have asked already; see ``_graph.example``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Where nothing but numbers meets a tensor that has values, torch computes with them, and would write them.
        if FakeTensor not in types and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            args, kwargs = tree_map_tensors(self.from_tensor, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


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


def record(function: Callable[..., Any], flat: Sequence[torch.Tensor], *, plain: bool) -> torch.fx.GraphModule:
    """The operators that a function runs on fake tensors, as a graph.

    Args:
        function: of tensors.
        flat: its arguments.
        plain: whether no size is a symbol; usual operators are then written down by a shorter way than make_fx's own. It gives
            the same graph in half the time; all goes by make_fx's way where torch lacks what the short one needs.
    """
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module

        without_code: AbstractContextManager[Any] = _use_lazy_graph_module(True)
    except ImportError:
        without_code = nullcontext()
    options: dict[str, Any] = {}
    if plain and all(hasattr(proxy_tensor, name) for name in ("_ProxyTensor", "snapshot_fake", "get_proxy_mode")):
        function = functools.partial(_quickly, function)
    if plain and "_disable_torch_fn_metadata_mode" in inspect.signature(proxy_tensor.make_fx).parameters:
        options["_disable_torch_fn_metadata_mode"] = True  # which public function called an operator: nobody asks
    with without_code:  # nobody reads the code of the raw graph
        return proxy_tensor.make_fx(function, **options)(*flat)


def _quickly(function: Callable[..., Any], *flat: torch.Tensor) -> Any:
    mode = proxy_tensor.get_proxy_mode()
    if type(mode) is proxy_tensor.ProxyTorchDispatchMode:
        mode.__class__ = _QuickMode
    return function(*flat)


class _QuickMode(proxy_tensor.ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes plain operators down itself: those of aten, on tensors that are in the graph already and are no constants."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked more often than anything else
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # their rules go by the very class of a mode
            return func.python_key_table[proxy_tensor.ProxyTorchDispatchMode](self, *args, **kwargs)
        tracer = self.tracer
        graph, known = tracer.graph, tracer.tensor_tracker

        def argument(value: Any) -> Any:
            kind = type(value)
            if kind is FakeTensor:
                slot = known.get(value)
                if slot is None or slot.constant is not None:
                    raise _Unusual
                return slot.proxy.node
            if kind is list or kind is tuple:
                return kind([argument(item) for item in value])
            if kind in _PLAIN_TYPES:
                return value
            raise _Unusual

        def note(tensor: torch.Tensor, node: torch.fx.Node) -> None:
            node.meta["val"] = proxy_tensor.snapshot_fake(tensor)
            known[tensor] = proxy_tensor._ProxyTensor(torch.fx.Proxy(node, tracer), None)

        name = _plain_name(func)
        try:
            if name is None:
                raise _Unusual
            inputs = tuple([argument(value) for value in args])
            named = {name: argument(value) for name, value in kwargs.items()}
        except _Unusual:
            return super().__torch_dispatch__(func, types, args, kwargs)
        node = graph.create_node("call_function", func, inputs, named, name)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            note(result, node)
            return result
        picks = [graph.create_node("call_function", operator.getitem, (node, i)) for i in range(len(result))]
        for tensor, pick in zip(result, picks, strict=True):
            if tensor is not None:
                note(tensor, pick)
        node.meta["val"] = tuple(pick.meta.get("val") for pick in picks)
        return result


class _Unusual(Exception):
    """Not for the short way."""


_PLAIN_TYPES = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


@functools.cache
def _plain_name(func: Any) -> str | None:
    """What nodes of an operator are called that computes tensors from tensors and is not made of others; or None."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    plain = (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and func is not torch.ops.aten.lift_fresh.default
        and tags.isdisjoint(func.tags)
        and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        and bool(func._schema.returns)
        and all(str(result.type) == "Tensor" for result in func._schema.returns)
    )
    return torch.fx.Graph()._target_to_str(func.overloadpacket.__name__) if plain else None


def current_graph() -> torch.fx.Graph | None:
    """The graph that make_fx is writing now; None (nodes then get no module names) where torch does not say."""
    try:
        mode = proxy_tensor.get_proxy_mode()
        return None if mode is None else mode.tracer.graph
    except AttributeError:
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


@contextmanager
def watch_checkpoints(enter: Callable[[Any], None], leave: Callable[[], None]) -> Iterator[None]:
    """Tell when a checkpointed region runs, and runs again: each has an object of its own.

    Without the names nothing is told: what draws or writes in such a region is then refused.
    """
    from torch.utils import checkpoint

    names = ("_checkpoint_hook", "_recomputation_hook")
    found = {name: getattr(checkpoint, name, None) for name in names}

    def telling(hook: Any) -> Any:
        class Telling(hook):  # type: ignore[misc]
            def __init__(self, frame: Any, *rest: Any) -> None:
                super().__init__(frame, *rest)
                self.region = frame() if isinstance(frame, weakref.ref) else frame

            def __enter__(self) -> Any:
                enter(self.region)
                return super().__enter__()

            def __exit__(self, *error: Any) -> Any:
                leave()
                return super().__exit__(*error)

        return Telling

    if None in found.values():
        yield
        return
    for name, hook in found.items():
        setattr(checkpoint, name, telling(hook))
    try:
        yield
    finally:
        for name, hook in found.items():
            setattr(checkpoint, name, hook)


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


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks of its own on its gradient; False (they are then left out unseen) where torch does not say."""
    return bool(getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None))


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
