from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_graphpasses import ParallelPlan, shard
from stepwell_graphpasses._plan import matches
from stepwell_graphpasses.exceptions import PlanError

NAMES = [
    "embed.weight",
    *(f"layers.{i}.{part}" for i in range(12) for part in ("attn.weight", "attn.bias", "norm.weight")),
    "head.weight",
    "scale",
]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers", "layers", True),
        ("layers.*", "layers.10", True),
        ("layers.*", "layers.10.attn", False),
        ("layers.0-3", "layers.3", True),
        ("layers.0-3", "layers.4", False),
        ("layers.0-3", "layers.30", False),
        ("layers.1-11", "layers.2", True),
        ("layers.?", "layers.9", True),
        ("layers.?", "layers.10", False),
        ("**.norm", "layers.1.norm", True),
        ("**.norm", "norm", True),
        ("layers.**", "layers.1.norm.weight", True),
        ("*", "embed", True),
        ("a+b", "aab", False),
        ("layers.a-b", "layers.1", False),
    ],
)
def test_a_pattern_names_what_it_says(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_a_module_pattern_covers_what_is_below_and_the_rest_stays_whole() -> None:
    resolved = shard("layers.*", "embed").resolve(NAMES)
    assert resolved.units["layers.3.attn.weight"] == "layers.3"
    assert resolved.units["embed.weight"] == "embed"
    assert resolved.whole == ("head.weight", "scale")


def test_a_star_covers_everything_and_a_root_parameter_can_be_named() -> None:
    assert shard("*").resolve(NAMES).whole == ()
    assert shard("scale").resolve(NAMES).units == {"scale": "scale"}
    assert shard("layers.0.norm.weight").resolve(NAMES).units == {"layers.0.norm.weight": "layers.0.norm.weight"}


def test_the_first_pattern_that_covers_a_parameter_names_its_unit() -> None:
    assert shard("layers.0.attn", "layers.*").resolve(NAMES).units["layers.0.attn.bias"] == "layers.0.attn"


def test_a_pattern_that_matches_nothing_lists_near_names() -> None:
    with pytest.raises(PlanError, match=r"'layer\.0' names no module with parameters; near names: layers\.0") as error:
        shard("embed", "layer.0").resolve(NAMES, modules=["layers", "layers.0", "embed"])
    assert error.value.pattern == "layer.0"
    assert "layers.0" in error.value.near


def test_without_anything_near_some_names_are_listed() -> None:
    with pytest.raises(PlanError, match=r"there are: .*embed"):
        shard("zzzzzzzz").resolve(NAMES, modules=["embed"])


def test_an_empty_plan_is_refused_because_methods_return_new_plans() -> None:
    plan = ParallelPlan()
    plan.shard("*")
    with pytest.raises(PlanError, match="each method returns a new plan"):
        plan.resolve(NAMES)


def test_stages() -> None:
    modules = ["", "embed", "layers", *(f"layers.{i}" for i in range(8)), "head"]
    plan = ParallelPlan().stage(1, "layers.4-7", "head").stage(0, "embed", "layers.0-3")
    owner = plan.resolve_stages(modules)
    assert [owner[f"layers.{i}"] for i in range(8)] == [0] * 4 + [1] * 4
    assert owner["embed"] == 0
    assert "layers" not in owner


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ParallelPlan().stage(-1, "a"), "from 0 up"),
        (lambda: ParallelPlan().stage(True, "a"), "from 0 up"),
        (lambda: ParallelPlan().stage(0, "a").stage(0, "b"), "given twice"),
        (lambda: ParallelPlan().stage(0), "at least one pattern"),
        (lambda: ParallelPlan().shard(), "at least one pattern"),
        (lambda: ParallelPlan().shard(3), "a pattern is a string"),
        (lambda: ParallelPlan().shard("a..b"), "no dotted name"),
        (lambda: ParallelPlan().shard(" "), "no dotted name"),
        (lambda: ParallelPlan().shard("layers.3-1.norm"), "the range 3-1 in 'layers.3-1.norm' is empty; write 1-3"),
        (lambda: ParallelPlan().stage(0, "a").stage(2, "b").resolve_stages(["a", "b"]), "without a gap"),
        (
            lambda: ParallelPlan().stage(0, "a").stage(1, "*").resolve_stages(["a", "b"]),
            "claimed by stage 0 and by stage 1",
        ),
        (lambda: ParallelPlan().stage(0, "c").resolve_stages(["a", "b"]), "stage 0 pattern 'c' names no module"),
        (lambda: ParallelPlan.from_dict({"shards": []}), "unknown key 'shards'"),
        (lambda: ParallelPlan.from_dict({3: []}), "unknown key 3"),
        (lambda: ParallelPlan.from_dict([]), "mapping"),
        (lambda: ParallelPlan.from_dict({"shard": 3}), "list of patterns"),
        (lambda: ParallelPlan.from_dict({"shard": None, "stages": None}), None),
        (lambda: ParallelPlan.from_dict({"shard": [], "stages": {}}), None),
        *(
            (lambda value=value: ParallelPlan.from_dict({"shard": value}), "list of patterns")
            for value in (0, False, b"a", {})
        ),
        *(
            (lambda value=value: ParallelPlan.from_dict({"stages": value}), "maps stage numbers")
            for value in ([], [1], "", 0)
        ),
        *(
            (lambda key=key: ParallelPlan.from_dict({"stages": {key: "a"}}), "whole number")
            for key in (True, 1.0, -1, None)
        ),
        (lambda: ParallelPlan.from_dict({"stages": {"0": "a", 0: "b"}}), "stage 0 is given twice"),
        (lambda: ParallelPlan.from_dict({"shard": ["a", 3]}), r"a pattern is a string; got 3 \(int\)"),
        (lambda: ParallelPlan.from_dict({"stages": {"x": ["a"]}}), "whole number"),
        (lambda: ParallelPlan.from_json("{"), "not a JSON text"),
        (lambda: ParallelPlan.from_json('{"shard": ["a"], "shard": ["b"]}'), "the key 'shard' is given twice"),
    ],
)
def test_mistakes_are_refused(build: object, message: str | None) -> None:
    assert callable(build)
    if message is None:
        assert build() == ParallelPlan()
        return
    with pytest.raises(PlanError, match=message):
        build()


patterns = st.lists(st.sampled_from(["embed", "layers.*", "layers.0-3", "**.norm", "scale"]), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(patterns, st.dictionaries(st.integers(0, 5), patterns, max_size=3))
def test_a_plan_survives_dict_and_json(shards: list[str], stages: dict[int, list[str]]) -> None:
    plan = ParallelPlan().shard(*shards)
    for index, names in stages.items():
        plan = plan.stage(index, *names)
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    assert ParallelPlan.from_json(plan.to_json()) == plan
