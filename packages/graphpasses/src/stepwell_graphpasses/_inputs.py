"""What a graph may be called with: the inputs it was captured from, and everything about them that it relies on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from . import _compat as compat
from .exceptions import CaptureError, GuardError


@attrs.frozen
class TensorGuard:
    """What one tensor input must look like; a size or stride of None may be any (see :attr:`InputGuards.relations`)."""

    name: str
    dtype: torch.dtype
    device: torch.device
    size: tuple[int | None, ...]
    stride: tuple[int, ...] | None  # None: contiguous

    def problems(self, tensor: torch.Tensor) -> list[str]:
        """One sentence for each way in which a tensor differs."""
        if not isinstance(tensor, torch.Tensor):
            return [f"{self.name}: expected a tensor, got {type(tensor).__name__}"]
        if tensor.layout is not torch.strided:
            return [f"{self.name}: expected a dense tensor, got one of {tensor.layout}; call to_dense()"]
        found = []
        if tensor.dtype != self.dtype:
            found.append(f"{self.name}: expected {self.dtype}, got {tensor.dtype}")
        if tensor.device != self.device:
            found.append(f"{self.name}: expected device {self.device}, got {tensor.device}")
        shape = tuple(tensor.shape)
        same_rank = len(shape) == len(self.size)
        if not same_rank or any(want not in (None, got) for want, got in zip(self.size, shape, strict=True)):
            want = tuple("any" if size is None else size for size in self.size)
            return [*found, f"{self.name}: expected shape ({', '.join(map(str, want))}), got {shape}"]
        for dim, size in enumerate(shape):
            if self.size[dim] is None and size < 2:
                found.append(
                    f"{self.name}: dim {dim} is dynamic from 2 up, got {size}: sizes 0 and 1 need their own graph"
                )
        if self.stride is None:
            if not tensor.is_contiguous():
                found.append(
                    f"{self.name}: expected a contiguous tensor, got stride {tensor.stride()}; call contiguous()"
                )
        elif any(s > 1 and a != b for s, a, b in zip(shape, self.stride, tensor.stride(), strict=True)):
            found.append(f"{self.name}: expected stride {self.stride}, got {tensor.stride()}")
        return found


@attrs.frozen
class Relation:
    """A condition on dynamic sizes that tracing relied on: ``holds(sizes)`` and its text."""

    holds: Callable[[Mapping[tuple[str, int], int]], bool] = attrs.field(eq=False)
    text: str


@attrs.frozen
class InputGuards:
    """Everything a graph assumes about its inputs.

    Attributes:
        spec: structure of the keyword arguments.
        leaves: for each leaf in order, a :class:`TensorGuard`, or ``(name, value)`` for what is built into the graph.
        aliases: indices of tensor leaves that share memory, in groups.
        relations: conditions on dynamic sizes.
    """

    spec: Any
    leaves: tuple[TensorGuard | tuple[str, Any], ...]
    aliases: tuple[tuple[int, ...], ...]
    relations: tuple[Relation, ...] = ()

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensor inputs, in the graph's order."""
        return tuple(leaf.name for leaf in self.leaves if isinstance(leaf, TensorGuard))

    def flatten(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in the graph's order, once they are known to fit.

        Raises:
            GuardError: they do not; nothing has run.
        """
        named, spec = compat.flatten_named(dict(inputs))
        problems = self._problems(named, spec)
        if problems:
            raise GuardError(
                "the inputs are not those that the graph was made for:\n  " + "\n  ".join(problems), problems=problems
            )
        return [leaf for (_, leaf), guard in zip(named, self.leaves, strict=True) if isinstance(guard, TensorGuard)]

    def accepts(self, inputs: Mapping[str, Any]) -> bool:
        """Whether :meth:`flatten` would."""
        return not self._problems(*compat.flatten_named(dict(inputs)))

    def _problems(self, named: Sequence[tuple[str, Any]], spec: Any) -> list[str]:
        expected = [leaf.name if isinstance(leaf, TensorGuard) else leaf[0] for leaf in self.leaves]
        if spec != self.spec or len(named) != len(self.leaves):
            return [f"expected the inputs {', '.join(expected)}; got {', '.join(name for name, _ in named)}"]
        problems: list[str] = []
        tensors = []
        for (name, leaf), guard in zip(named, self.leaves, strict=True):
            if isinstance(guard, TensorGuard):
                problems += guard.problems(leaf)
                tensors.append(leaf)
            elif not is_same(leaf, guard[1]):
                problems.append(f"{name}: the graph was made for the value {guard[1]!r}, got {leaf!r}")
        if problems:
            return problems
        if find_aliases(tensors) != self.aliases:
            names = [[self.tensor_names[i] for i in group] for group in self.aliases]
            problems.append(f"other inputs share memory than when the graph was made (then: {names or 'none'})")
        if self.relations:
            sizes = {
                (guard.name, dim): int(tensor.shape[dim])
                for guard, tensor in zip((g for g in self.leaves if isinstance(g, TensorGuard)), tensors, strict=True)
                for dim in range(tensor.dim())
            }
            problems += [
                f"the graph relies on {relation.text}" for relation in self.relations if not relation.holds(sizes)
            ]
        return problems


def is_same(left: Any, right: Any) -> bool:
    """Whether a value that is built into a graph is this one; 1, 1.0 and True are three, not-a-number is one."""
    if left is right or type(left) is not type(right):
        return left is right
    return repr(left) == repr(right) if isinstance(left, float | complex) else bool(left == right)


def find_aliases(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Groups of indices of tensors that share their storage."""
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(index)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def refuse_gradients(inputs: Mapping[str, Any]) -> None:
    """Gradients go to parameters of the model alone: a tensor that waits for one would wait for ever.

    Raises:
        GuardError: an input requires grad.
    """
    found = [name for name, leaf in compat.flatten_named(dict(inputs))[0] if getattr(leaf, "requires_grad", False)]
    if found:
        problem = f"{found[0]}: it requires grad, and a graph has gradients of the model's parameters only; detach it"
        raise GuardError(f"the inputs are not those of a graph:\n  {problem}", problems=[problem])


@attrs.frozen
class DynamicDims:
    """Which dims of which inputs may change from call to call.

    Attributes:
        everything: every dim of every tensor that is 2 or more when the graph is made.
        named: dims by dotted input name; these must not become constants in the graph.
    """

    everything: bool = False
    named: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def of(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The dynamic dims of one input.

        Raises:
            CaptureError: a named dim is out of range, or has size 0 or 1 now.
        """
        dims: list[int] = []
        for dim in dict(self.named).get(name, ()):
            if not -tensor.dim() <= dim < tensor.dim():
                raise CaptureError(f"dynamic dim {dim} of {name} does not exist: its shape is {tuple(tensor.shape)}")
            dim %= tensor.dim()
            if tensor.shape[dim] < 2:
                raise CaptureError(
                    f"dim {dim} of {name} cannot be made dynamic from size {tensor.shape[dim]}: sizes 0 and 1 need their own"
                    " graph; compile with an example of size 2 or more"
                )
            dims.append(dim)
        if self.everything:
            dims += [dim for dim in range(tensor.dim()) if tensor.shape[dim] >= 2]
        return tuple(sorted(set(dims)))

    def require(self, names: Sequence[str]) -> None:
        """Refuse names of inputs that are not there.

        Raises:
            CaptureError: such a name.
        """
        for name, _ in self.named:
            if name not in names:
                raise CaptureError(f"dynamic_arg_dims names the input {name!r}; tensor inputs are {', '.join(names)}")


@attrs.frozen
class FakeInputs:
    """The inputs of a capture without their data, and what is known about them so far."""

    tree: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    guards: InputGuards
    symbols: dict[Any, tuple[str, int]]


def fake_inputs(inputs: Mapping[str, Any], mode: compat.ExampleMode, dynamic: DynamicDims) -> FakeInputs:
    """Fakes of example inputs, with symbols for dynamic sizes.

    Raises:
        CaptureError: an input is a DTensor, or dynamic and not contiguous; or a dynamic dim is wrong.
    """
    named, spec = compat.flatten_named(dict(inputs))
    dynamic.require([name for name, leaf in named if isinstance(leaf, torch.Tensor)])
    leaves: list[Any] = []
    guards: list[TensorGuard | tuple[str, Any]] = []
    fakes: list[torch.Tensor] = []
    reals: list[torch.Tensor] = []
    symbols: dict[Any, tuple[str, int]] = {}
    shared: dict[int, torch.Tensor] = {}
    for name, leaf in named:
        if not isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
            guards.append((name, leaf))
            continue
        if isinstance(leaf, DTensor):
            raise CaptureError(f"input {name} is a DTensor; pass this rank's own part of the batch as a plain tensor")
        if leaf.layout is not torch.strided:
            raise CaptureError(
                f"input {name} is a tensor of {leaf.layout}, which has no memory that a graph could look at; pass it dense, or"
                " its parts as tensors of their own"
            )
        dims = dynamic.of(name, leaf)
        if dims and not leaf.is_contiguous():
            raise CaptureError(f"input {name} has dynamic dims {dims} and is not contiguous; call contiguous() on it")
        # The same tensor twice must stay the same tensor: what is written through one name is read through the other.
        fake = shared.get(id(leaf))
        if fake is None:
            fake = shared[id(leaf)] = compat.symbolic_input(mode, leaf.detach(), dims)
        for dim in dims:
            symbols.setdefault(fake.shape[dim].node.expr, (name, dim))  # type: ignore[attr-defined]
        guards.append(
            TensorGuard(
                name,
                leaf.dtype,
                leaf.device,
                tuple(None if dim in dims else int(size) for dim, size in enumerate(leaf.shape)),
                None if dims else tuple(leaf.stride()),
            )
        )
        leaves.append(fake)
        fakes.append(fake)
        reals.append(leaf)
    tree = compat.unflatten(leaves, spec)
    return FakeInputs(tree, tuple(fakes), InputGuards(spec, tuple(guards), find_aliases(reals)), symbols)


def size_relations(env: Any, symbols: Mapping[Any, tuple[str, int]], dynamic: DynamicDims) -> tuple[Relation, ...]:
    """What tracing came to rely on about dynamic sizes.

    Raises:
        CaptureError: a dim that was named as dynamic became a constant.
    """
    named = {(name, dim) for name, dims in dynamic.named for dim in dims}

    def words(expression: Any) -> str:
        text = str(expression)
        for symbol in expression.free_symbols:
            text = text.replace(str(symbol), _size(symbols[symbol]))
        return text

    def value(expression: Any, sizes: Mapping[tuple[str, int], int]) -> Any:
        return expression.subs({symbol: sizes[symbols[symbol]] for symbol in expression.free_symbols})

    def equation(place: tuple[str, int], right: Any) -> Relation:
        return Relation(lambda sizes: bool(sizes[place] == value(right, sizes)), f"{_size(place)} == {words(right)}")

    def condition(expression: Any) -> Relation:
        return Relation(lambda sizes: bool(value(expression, sizes)), words(expression))

    def bounds(place: tuple[str, int], low: int, high: int) -> Relation:
        return Relation(lambda sizes: low <= sizes[place] <= high, f"{low} <= {_size(place)} <= {high}")

    known = set(symbols)
    found = [condition(g.expr) for g in env.guards if g.expr.free_symbols and g.expr.free_symbols <= known]
    for symbol, place in symbols.items():
        if (right := env.replacements.get(symbol)) is not None:
            if not right.free_symbols and place in named:
                raise CaptureError(
                    f"dim {place[1]} of {place[0]} was to be dynamic, but the model makes it the constant {right};"
                    " leave it out of dynamic_arg_dims, or change the code that fixes it"
                )
            found.append(equation(place, right))
        reach = env.var_to_range.get(symbol)
        if reach is not None:
            low = int(reach.lower) if reach.lower > 0 else 0
            high = int(reach.upper) if reach.upper < sys.maxsize else sys.maxsize
            if low > 2 or high < sys.maxsize:
                found.append(bounds(place, low, high))
    return tuple({relation.text: relation for relation in found}.values())


def _size(place: tuple[str, int]) -> str:
    return f"{place[0]}.size({place[1]})"
