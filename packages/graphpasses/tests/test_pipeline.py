from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest

from stepwell_graphpasses import GraphCompiler, PassConfig, PassContext, PassContract, PassPipeline, PassReport, trace
from stepwell_graphpasses.exceptions import ConfigError, PassError, PipelineOrderError
from stepwell_graphpasses.passes import BucketPass, DataParallelPass, OverlapPass, ReshardPass
from stepwell_graphpasses.testing import fake_world


class Step:
    """A pass that only has a contract."""

    def __init__(self, name: str, **contract: Any) -> None:
        self.name = name
        self.contract = PassContract(**{k: frozenset(v) if k != "changes_numerics" else v for k, v in contract.items()})

    def run(self, joint: Any, context: Any) -> None:
        joint.notes.append((self.name, "ran"))
        if self.name == "fails":
            raise KeyError("inside")


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([Step("b", requires={"x"})], "pass b requires x, which no pass before it provides"),
        ([Step("b", requires={"x"}), Step("a", provides={"x"})], "put a before it"),
        ([Step("a", provides={"x"}), Step("b", conflicts={"x"})], "pass b cannot run after pass a, which provides x"),
        ([BucketPass()], "pass bucket requires collectives"),
        ([DataParallelPass(), BucketPass(), ReshardPass()], "reshard cannot run after pass bucket"),
        ([DataParallelPass(), DataParallelPass()], "data_parallel cannot run after pass data_parallel"),
        ([OverlapPass(), DataParallelPass()], "put data_parallel before it"),
        ([DataParallelPass(), BucketPass(), ReshardPass()], "put reshard before it, or leave one of them out"),
        ([DataParallelPass(), BucketPass], r"passes\[1\] is no pass but .*; write BucketPass\(\)"),
        ([print], r"passes\[0\] is no pass but .*print.*, which has no name, contract or run"),
    ],
)
def test_an_order_that_cannot_work_is_refused_before_anything_runs(passes: Any, message: str) -> None:
    with pytest.raises(PipelineOrderError, match=message):
        PassPipeline(passes)


def test_initial_facts_and_numerics() -> None:
    pipeline = PassPipeline([Step("b", requires={"x"}, changes_numerics=True), Step("c")], initial=frozenset({"x"}))
    assert pipeline.changes_numerics == ("b",)
    with pytest.raises(PipelineOrderError, match="cannot run after the graph"):
        PassPipeline([Step("b", conflicts={"x"})], initial=frozenset({"x"}))


def test_a_run_leaves_its_input_alone_and_reports() -> None:
    joint = trace(support.MLP(4, 3), support.mse_loss, support.pair((4, 3), rank=0))
    text = str(joint.graph)
    context = PassContext(PassConfig(), None, {})
    reports: list[PassReport] = []
    result = PassPipeline([Step("a", provides={"x"})]).run(joint, context, reports=reports, diffs=True)
    assert result is not joint
    assert result.facts == {"x"}
    assert joint.facts == frozenset()
    assert joint.notes == []
    assert str(joint.graph) == text
    assert reports[0].diff == ""
    assert str(reports[0]).startswith("a: ")
    with pytest.raises(PassError, match=r"pass fails failed: KeyError: 'inside'") as error:
        PassPipeline([Step("a"), Step("fails")]).run(joint, context)
    assert error.value.pass_name == "fails"
    assert isinstance(error.value.__cause__, KeyError)


def test_a_report_can_show_what_a_pass_changed() -> None:
    from stepwell_graphpasses import shard
    from stepwell_graphpasses._table import plan_layouts

    joint = trace(support.MLP(4, 3), support.mse_loss, support.pair((4, 3), rank=0), param_dtype=None)
    layouts = plan_layouts(joint.table, shard("**"), PassConfig(), degree=1)
    reports: list[PassReport] = []
    PassPipeline([DataParallelPass()]).run(
        joint, PassContext(PassConfig(reduce=2.0), None, layouts), reports=reports, diffs=True
    )
    assert "+    %div_tensor" in reports[0].diff


def test_a_graph_that_passes_have_been_over_is_refused_by_those_that_cannot_run_again() -> None:
    """Gathers of what was gathered already: the pipeline looked only at its own passes."""
    inputs = support.pair((4, 3), rank=0)
    with fake_world(2):
        compiler = GraphCompiler(support.MLP(4, 3), support.mse_loss).compile(**inputs)
        with pytest.raises(
            PipelineOrderError, match="pass data_parallel cannot run after the graph, which provides coll"
        ):
            compiler.build(compiler.graph())
        assert compiler.build(compiler.source_graph()).facts == compiler.graph().facts


@pytest.mark.parametrize("field", ["requires", "provides", "conflicts"])
def test_facts_are_sets_of_words(field: str) -> None:
    with pytest.raises(ConfigError, match=r"write \{'bucketed'\}; got 'bucketed'"):
        PassContract(**{field: "bucketed"})
    assert getattr(PassContract(**{field: ["bucketed"]}), field) == frozenset({"bucketed"})
