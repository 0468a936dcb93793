"""normalize_outputs: every structure that a module may return comes back as it was; the rest is refused by name and place."""

from __future__ import annotations

import dataclasses
import enum
import gc
import math
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from stepwell_meta import MetadataError, Structure, UnsupportedValueError, decode, encode, normalize_outputs

H, MASK, AUX = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool), torch.ones(())


class Carry(NamedTuple):
    h: torch.Tensor
    mask: torch.Tensor | None = None


OldCarry = namedtuple("OldCarry", ["h", "n"])


@dataclasses.dataclass
class Block:
    h: torch.Tensor
    scale: float = 1.0
    rest: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    h: torch.Tensor
    _: dataclasses.KW_ONLY
    rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.h.shape[0])


@attrs.frozen
class Record:
    h: torch.Tensor
    _hidden: int = 3
    tags: tuple[str, ...] = attrs.field(default=(), kw_only=True)


@attrs.define
class Growing:
    h: torch.Tensor
    seen: int = attrs.field(init=False, default=0)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"
    CRIMSON = "red"  # an alias


class Level(enum.IntEnum):
    LOW = 1


class ModelOutput(OrderedDict[str, Any]):
    """Like transformers' outputs: an ordered dict that leaves out what is None, registered with torch's pytree."""

    def __init__(self, **fields: Any) -> None:
        super().__init__((name, value) for name, value in fields.items() if value is not None)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class LanguageModelOutput(ModelOutput):
    pass


for cls in (ModelOutput, LanguageModelOutput):
    _pytree.register_pytree_node(
        cls,
        lambda value: (list(value.values()), list(value.keys())),
        lambda values, keys, cls=cls: cls(**dict(zip(keys, values, strict=True))),
    )


@dataclasses.dataclass(frozen=True)
class Constant:
    value: Any


_pytree.register_constant(Constant)


# name: value, number of tensors, printed form
STRUCTURES: dict[str, tuple[Any, int, str]] = {
    "tensor": (H, 1, "*"),
    "tuple": ((H, MASK), 2, "(*, *)"),
    "single": ((H,), 1, "(*,)"),
    "empty tuple": ((), 0, "()"),
    "list": ([H, [MASK], []], 2, "[*, [*], []]"),
    "dict": ({"h": H, "mask": None, 3: (MASK,)}, 2, "{'h': *, 'mask': None, 3: (*,)}"),
    "odd keys": ({(1, "a"): H, None: 1, True: 2, b"x": 3, Color.BLUE: 4}, 1, "{(1, 'a'): *, None: 1"),
    "ordered dict": (OrderedDict(b=H, a=MASK), 2, "OrderedDict({'b': *, 'a': *})"),
    "statics": ((None, True, 1, -1.5, 2j, "s", b"b", torch.bfloat16), 0, "(None, True, 1, -1.5, 2j, 's', b'b', torch."),
    "size": (H.shape, 0, "torch.Size([2, 3])"),
    "named tuple": (Carry(H), 1, "Carry(h=*, mask=None)"),
    "old named tuple": (OldCarry(H, (1, MASK)), 2, "OldCarry(h=*, n=(1, *))"),
    "dataclass": (Block(H, rest={"x": [MASK]}), 2, "Block(h=*, scale=1.0, rest={'x': [*]})"),
    "frozen dataclass": (Counted(H), 1, "Counted(h=*, rows=2)"),
    "attrs class": (Record(H, tags=("a",)), 1, "Record(h=*, _hidden=3, tags=('a',))"),
    "mutable attrs class": (Growing(H), 1, "Growing(h=*, seen=0)"),
    "enums": ([Color.RED, Color.CRIMSON, Level.LOW], 0, "[Color.RED, Color.RED, Level.LOW]"),
    "model output": (ModelOutput(logits=H, loss=None, aux=(AUX, MASK)), 3, "ModelOutput[*, (*, *); ['logits', 'aux']]"),
    "nested model output": (Carry(LanguageModelOutput(logits=H)), 1, "Carry(h=LanguageModelOutput[*; ['logits']], "),
    "registered constant": ([Constant(3)], 0, "[Constant(value=3)]"),
    "deque": (deque([H, 1], maxlen=3), 1, "deque[*, 1; 3]"),
    "return type": (torch.max(H, 0), 2, "max[*, *; "),
}
CLASSES = (Carry, OldCarry, Block, Counted, Record, Growing, Color, Level, Constant)


def same(left: Any, right: Any) -> bool:
    """Equal in types and values, tensors by identity."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left is right
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if attrs.has(type(left)):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in attrs.fields(type(left)))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize(("value", "count", "printed"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_every_structure_is_taken_apart_and_put_together(value: Any, count: int, printed: str) -> None:
    outputs = normalize_outputs(value)
    assert len(outputs.leaves) == outputs.structure.num_leaves == count
    assert all(isinstance(leaf, torch.Tensor) for leaf in outputs.leaves)
    assert same(outputs.structure.rebuild(outputs.leaves), value)
    assert str(outputs.structure).startswith(printed)


@pytest.mark.parametrize(("value", "count", "printed"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_every_structure_survives_bytes(value: Any, count: int, printed: str) -> None:
    outputs = normalize_outputs(value)
    arrived = decode(encode(outputs.structure), classes=CLASSES)
    assert arrived == outputs.structure
    assert hash(arrived) == hash(outputs.structure)
    assert str(arrived) == str(outputs.structure)
    assert same(arrived.rebuild(outputs.leaves), value)


def test_all_structures_differ_from_each_other() -> None:
    structures = [normalize_outputs(value).structure for value, _, _ in STRUCTURES.values()]
    assert len(set(structures)) == len(structures)


def test_the_same_structure_with_other_tensors_is_equal() -> None:
    assert normalize_outputs(Block(H)).structure == normalize_outputs(Block(MASK)).structure


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((H, 1), (H, True)),
        ((H, 1), (H, 1.0)),
        ((H, 0.0), (H, -0.0)),
        ((H, 0j), (H, complex(0, -0.0))),
        ((H, "a"), (H, b"a")),
        ([H], (H,)),
        ({"a": H, "b": H}, {"b": H, "a": H}),
        ({"a": H}, OrderedDict(a=H)),
        (Carry(H, 1), OldCarry(H, 1)),
        (Color.RED, Color.BLUE),
        ((2, 3), torch.Size([2, 3])),
    ],
)
def test_what_python_calls_equal_may_be_another_structure(left: Any, right: Any) -> None:
    assert normalize_outputs(left).structure != normalize_outputs(right).structure


def test_nan_is_equal_to_itself_also_after_the_wire() -> None:
    structure = normalize_outputs((H, math.nan, complex(0, math.nan))).structure
    assert decode(encode(structure)) == structure
    assert structure == normalize_outputs((H, float("nan"), complex(0, float("nan")))).structure


def test_the_same_tensor_twice_is_two_leaves() -> None:
    assert normalize_outputs([H, H]).leaves == (H, H)


class Plain:
    pass


class TaggedList(list[Any]):
    pass


class UnregisteredOutput(dict[str, Any]):
    pass


@dataclasses.dataclass
class NeedsMore:
    h: torch.Tensor
    factor: dataclasses.InitVar[int]


@dataclasses.dataclass
class MayBeTold:
    """On another stage, what it was told came back as the default."""

    h: torch.Tensor
    factor: dataclasses.InitVar[int] = 1

    def __post_init__(self, factor: int) -> None:
        self.scale = factor


@dataclasses.dataclass
class DictToo(dict[str, Any]):
    h: torch.Tensor | None = None


class Bits(enum.Flag):
    A = 1
    B = 2


class Keeper:
    """Registered, with a tensor in its context."""

    def __init__(self, h: torch.Tensor, kept: Any) -> None:
        self.h, self.kept = h, kept


_pytree.register_pytree_node(Keeper, lambda value: ([value.h], value.kept), lambda values, kept: Keeper(*values, kept))

REFUSED: dict[str, tuple[Any, str, str]] = {
    "object": ({"a": [H, Plain()]}, "outputs['a'][1]", "Plain"),
    "function": ((H, len), "outputs[1]", "builtin_function_or_method"),
    "class": ((H, int), "outputs[1]", "type"),
    "set": (Block({1, 2}), "outputs.h", "set"),
    "device": (Record(H, torch.device("cpu")), "outputs._hidden", "torch.device"),
    "range": ([range(3)], "outputs[0]", "range"),
    "generator": ([(i for i in ())], "outputs[0]", "generator"),
    "list subclass": ((H, TaggedList()), "outputs[1]", "TaggedList"),
    "dict subclass": (UnregisteredOutput(h=H), "outputs", "UnregisteredOutput"),
    "user dict": (UserDict(h=H), "outputs", "collections.UserDict"),
    "container and dataclass": (DictToo(), "outputs", "DictToo"),
    "constructor needs more": (NeedsMore(H, 3), "outputs", "NeedsMore"),
    "constructor takes more": (MayBeTold(H, 3), "outputs", "MayBeTold"),
    "default dict": ([defaultdict(list, a=H)], "outputs[0] pytree context of collections.defaultdict[0]", "type"),
    "constant": ([Constant(len)], "outputs[0].value", "builtin_function_or_method"),
    "combined flag": ([Bits.A | Bits.B], "outputs[0]", "Bits"),
    "tensor as key": ({H: 1}, "outputs keys", "torch.Tensor"),
    "tensor in a context": (Keeper(H, [H]), f"outputs pytree context of {__name__}.Keeper[0]", "torch.Tensor"),
    "object as key": ({Plain(): H}, "outputs keys", "Plain"),
}


@pytest.mark.parametrize(("value", "path", "name"), REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_refused_by_name_and_place(value: Any, path: str, name: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        normalize_outputs(value)
    assert caught.value.path == path
    assert caught.value.type_name.endswith(name)
    assert str(caught.value).startswith(f"{path}: cannot send a ")
    assert caught.value.type_name in str(caught.value)


@dataclasses.dataclass
class MayLack:
    h: torch.Tensor
    later: torch.Tensor = dataclasses.field(init=False)


@attrs.define
class TakesOther:
    h: torch.Tensor

    def __init__(self, factor: int) -> None:
        self.h = H * factor


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (NeedsMore(H, 3), "constructor takes other arguments than its fields: make each argument a field"),
        (MayBeTold(H, 3), "constructor takes other arguments than its fields: make each argument a field"),
        (TakesOther(3), "constructor takes other arguments than its fields: make each argument a field"),
        (MayLack(H), "field 'later' is not set: set it, with None where it has no value"),
    ],
)
def test_of_a_class_of_fields_it_says_which_of_two_faults_it_has_and_what_to_do(value: Any, hint: str) -> None:
    """It named both faults for either, and told those who had used a dataclass to use dataclasses."""
    with pytest.raises(UnsupportedValueError, match=rf"stage; its {hint}, or register the class with torch's pytree$"):
        normalize_outputs(value)


class Shy:
    """A key that does not like to be printed, such as a tensor that is on a busy device."""

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        raise RuntimeError("printed")


def test_keys_are_printed_in_messages_only() -> None:
    """Each output's place was spelled out for a message that nobody needed: a tensor as key was copied from its device."""
    with pytest.raises(UnsupportedValueError, match=r"^outputs keys: cannot send a \S+Shy to another stage"):
        normalize_outputs({Shy(): H})


def test_a_value_in_itself_is_refused() -> None:
    loop: list[Any] = [H]
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="nested deeper than 64, or in itself"):
        normalize_outputs(loop)


def test_the_deepest_allowed_nesting_survives_bytes() -> None:
    value: Any = H
    for _ in range(64):
        value = [value]
    structure = normalize_outputs(value).structure
    assert same(decode(encode(structure)).rebuild([H]), value)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        normalize_outputs([value])


def test_a_registered_container_without_a_tensor_in_its_context_is_fine() -> None:
    outputs = normalize_outputs(Keeper(H, {"a": [1, None]}))
    rebuilt = decode(encode(outputs.structure)).rebuild(outputs.leaves)
    assert (rebuilt.h, rebuilt.kept) == (H, {"a": [1, None]})


def test_two_registered_containers_of_one_name_are_refused_unless_one_is_passed() -> None:
    """A class that was defined and registered twice, as in a notebook, was rebuilt as the first of the two, unasked."""

    def make() -> type:
        class Twice(list[Any]):
            pass

        _pytree.register_pytree_node(Twice, lambda value: (list(value), None), lambda values, _: Twice(values))
        return Twice

    first, second = make(), make()
    arrived = decode(encode(normalize_outputs(second([H])).structure))
    with pytest.raises(MetadataError, match=r"2 different classes called \S+Twice are registered .* pass the one"):
        arrived.rebuild([H])
    assert type(arrived.rebuild([H], classes=[second])) is second
    assert type(arrived.rebuild([H], classes=[first])) is first


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_leaves_is_refused(count: int) -> None:
    with pytest.raises(MetadataError, match=rf"expected 2 tensors for \(\*, \*\), got {count}"):
        normalize_outputs((H, MASK)).structure.rebuild([H] * count)


@pytest.mark.parametrize("name", ["named tuple", "dataclass", "attrs class", "enums"])
def test_a_class_that_was_not_passed_is_named(name: str) -> None:
    outputs = normalize_outputs(STRUCTURES[name][0])
    arrived = decode(encode(outputs.structure))
    with pytest.raises(MetadataError, match=r"class \S+:\w+ is not known here: pass it in `classes`"):
        arrived.rebuild(outputs.leaves)
    assert same(arrived.rebuild(outputs.leaves, classes=CLASSES), STRUCTURES[name][0])


def renamed(structure: Structure, old: str, new: str) -> Structure:
    """The structure with another name in its bytes, of the same length."""
    assert len(old) == len(new)
    return decode(encode(structure).replace(old.encode(), new.encode()), classes=CLASSES)


def test_a_class_with_other_fields_here_is_named() -> None:
    structure = normalize_outputs(Block(H)).structure
    with pytest.raises(MetadataError, match="use the same code on every rank"):
        renamed(structure, "scale", "ratio").rebuild([H])
    with pytest.raises(MetadataError, match=r"is a dataclass with fields .* but a named tuple"):
        renamed(structure, ":Block", ":Carry").rebuild([H])


def test_an_enum_member_that_is_missing_here_is_named() -> None:
    structure = normalize_outputs([Color.BLUE]).structure
    with pytest.raises(MetadataError, match="no enum member 'PINK'"):
        renamed(structure, "BLUE", "PINK").rebuild([])


def test_a_container_that_is_not_registered_here_is_named() -> None:
    structure = normalize_outputs(ModelOutput(h=H)).structure
    with pytest.raises(MetadataError, match=r"ModelOutpux is registered .* but not in this process"):
        renamed(structure, "ModelOutput", "ModelOutpux").rebuild([H])


def test_a_key_that_occurs_twice_is_refused() -> None:
    structure = normalize_outputs({"aa": H, "bb": H}).structure
    with pytest.raises(MetadataError, match="a key occurs twice"):
        renamed(structure, "bb", "aa").rebuild([H, H])


def test_an_error_in_a_constructor_says_which_structure() -> None:
    structure = normalize_outputs(Counted(H)).structure
    with pytest.raises(MetadataError, match=r"cannot rebuild Counted\(h=\*, rows=2\): AttributeError") as caught:
        structure.rebuild([None])
    assert isinstance(caught.value.__cause__, AttributeError)


def test_two_classes_of_one_name_are_refused() -> None:
    def make() -> type:
        @dataclasses.dataclass
        class Twin:
            h: torch.Tensor

        return Twin

    with pytest.raises(MetadataError, match="two different classes are called"):
        normalize_outputs([make()(H), make()(H)])
    with pytest.raises(MetadataError, match="two different classes are called"):
        normalize_outputs(H).structure.rebuild([H], classes=[make(), make()])


def test_a_structure_keeps_no_tensor_alive() -> None:
    tensor = torch.zeros(2)
    structure = normalize_outputs([tensor]).structure
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
    assert structure.num_leaves == 1


SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(allow_nan=True),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.bool, Color.RED, Level.LOW, torch.Size([1, 2])]),
)
KEYS = st.one_of(st.booleans(), st.integers(), st.text(max_size=4), st.tuples(st.integers(), st.text(max_size=2)))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    build: list[Callable[..., Any]] = [
        Block,
        Carry,
        OldCarry,
        lambda a, b: Record(a, tags=b),
        lambda a, b: deque([a, b]),
    ]
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.builds(lambda make, a, b: make(a, b), st.sampled_from(build), inner, inner),
        st.dictionaries(st.sampled_from(["logits", "aux"]), inner, max_size=2).map(
            lambda fields: ModelOutput(**fields)
        ),
    )


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.recursive(st.one_of(SCALARS, st.sampled_from([H, MASK, AUX])), containers, max_leaves=12))
def test_any_structure_survives_flattening_and_bytes(value: Any) -> None:
    outputs = normalize_outputs(value)
    arrived = decode(encode(outputs.structure), classes=CLASSES)
    assert arrived == outputs.structure
    rebuilt = arrived.rebuild(outputs.leaves)
    assert normalize_outputs(rebuilt).structure == outputs.structure
    assert all(a is b for a, b in zip(normalize_outputs(rebuilt).leaves, outputs.leaves, strict=True))
    assert str(arrived) == str(outputs.structure)
