"""Plans as YAML text. Without PyYAML, which only the extra `yaml` brings, these tests ask for it by name or are left out."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_graphpasses import ParallelPlan, shard
from stepwell_graphpasses.exceptions import PlanError


@pytest.mark.parametrize("use", [lambda: shard("a").to_yaml(), lambda: ParallelPlan.from_yaml("shard: a")])
def test_without_pyyaml_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, use: Any) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(PlanError, match=r"pip install 'stepwell-graphpasses\[yaml\]', or use to_json"):
        use()


class TestWithPyYAML:
    @pytest.fixture(autouse=True)
    def _needs_it(self) -> None:
        pytest.importorskip("yaml")

    def test_a_plan_as_it_is_written(self) -> None:
        plan = ParallelPlan.from_yaml(
            """
            # what is sharded
            shard:
              - layers.*
              - "**.norm"
            stages:
              0: [embed, layers.0-3]
              1:
                - layers.4-7
                - head
            """
        )
        assert plan == shard("layers.*", "**.norm").stage(0, "embed", "layers.0-3").stage(1, "layers.4-7", "head")
        assert plan.to_yaml() == (
            "shard:\n- layers.*\n- '**.norm'\nstages:\n  0:\n  - embed\n  - layers.0-3\n  1:\n  - layers.4-7\n  - head\n"
        )

    @pytest.mark.parametrize(
        ("text", "plan"),
        [
            ("shard: [0, 2.5, no, on, 1e3, 0x1, 12:30, 2001-01-01, ~a, null.x]", None),
            ("shard: layers.*", shard("layers.*")),
            ("shard:\nstages:\n", ParallelPlan()),
            ("shard: []\nstages: {}", ParallelPlan()),
            ("{}", ParallelPlan()),
            ("stages: {0: embed, '1': head}", ParallelPlan().stage(0, "embed").stage(1, "head")),
            ("stages: &s {0: &a [x, y]}\nshard: *a", shard("x", "y").stage(0, "x", "y")),
        ],
    )
    def test_names_stay_names_and_nothing_is_nothing(self, text: str, plan: ParallelPlan | None) -> None:
        """YAML makes a number of 0 and false of no; a Sequential has a module called 0."""
        expected = plan or shard("0", "2.5", "no", "on", "1e3", "0x1", "12:30", "2001-01-01", "~a", "null.x")
        assert ParallelPlan.from_yaml(text) == expected
        assert ParallelPlan.from_yaml(expected.to_yaml()) == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "a plan is a mapping with the keys 'shard' and 'stages'; got an empty text"),
            ("- a", "line 1: a plan is a mapping.*got a sequence"),
            ("shard: a\nshards: b", "line 2: unknown key 'shards' in a plan; a plan has 'shard' and 'stages'"),
            ("shard: a\nstages: {}\nshard: b", "line 3: the key 'shard' is given twice, first in line 1"),
            ("stages:\n  0: a\n  0: b", "line 3: the key '0' is given twice, first in line 2"),
            ("stages:\n  0: a\n  00: b", "line 3: stage 0 is given twice"),
            ("stages:\n  0: a\n  x: b", "line 3: a stage index is a whole number from 0 up; got 'x'"),
            ("stages:\n  0: a\n  -1: b", "line 3: a stage index is a whole number from 0 up; got '-1'"),
            ("stages:\n  0: a\n  1:", "line 3: stage 1 needs at least one pattern"),
            ("stages:\n- a", "line 2: 'stages' maps stage numbers to lists of patterns; got a sequence"),
            ("stages: a", "line 1: 'stages' maps stage numbers to lists of patterns; got a scalar"),
            ("shard:\n- a\n- [b]", "line 3: expected a pattern or a list of patterns; got a sequence"),
            ("shard:\n- a\n- b: c", "line 3: expected a pattern or a list of patterns; got a mapping"),
            ("shard:\n- a\n-", "line 3: expected a pattern or a list of patterns; got nothing"),
            ("shard:\n  a: b", "line 2: expected a pattern or a list of patterns; got a mapping"),
            ("shard:\n- a..b", "line 1: shard: 'a..b' is no dotted name"),
            ("stages:\n  ? [a, b]\n  : c", "line 2: a key is a name or a number; got a sequence"),
            ("shard: [a", r"(?s)not a YAML text.*line 1, column 10"),
            ("shard:\n\t- a", r"(?s)not a YAML text.*line 2, column 1"),
            ("shard: [a]\n---\nshard: [b]", r"(?s)not a YAML text.*line 2"),
            ("shard: [**]", r"(?s)not a YAML text.*line 1.*a name that begins with \* must be in quotes"),
            ("shard: [*norm]", r"(?s)not a YAML text.*line 1.*a name that begins with \* must be in quotes"),
            ("shard: &a [*a]", "line 1: expected a pattern or a list of patterns; got a sequence"),
            ("!!python/object/apply:os.getpid []", "line 1: a plan is a mapping.*got a sequence"),
        ],
    )
    def test_mistakes_are_refused_with_their_line(self, text: str, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            ParallelPlan.from_yaml(text)

    names = st.text(
        st.characters(codec="utf-8", exclude_characters=".", exclude_categories=["Zs", "Cc", "Cs"]), min_size=1
    )
    patterns = st.lists(st.lists(names, min_size=1, max_size=3).map(".".join), min_size=1, max_size=3)

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(patterns, st.dictionaries(st.integers(0, 5), patterns, max_size=3))
    def test_any_plan_survives(self, shards: list[str], stages: dict[int, list[str]]) -> None:
        plan = ParallelPlan().shard(*shards)
        for index, items in stages.items():
            plan = plan.stage(index, *items)
        assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
