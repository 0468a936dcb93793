"""What passes cost grows as the graph does: a model four times as deep takes about four times the work."""

from __future__ import annotations

from typing import Any

import graphpasses_support as support
import pytest
import torch

from stepwell_graphpasses import (
    BucketPass,
    DataParallelPass,
    GraphCompiler,
    OverlapPass,
    PassConfig,
    ReshardPass,
    RooflineCosts,
    default_passes,
    trace,
)
from stepwell_graphpasses.testing import fake_world
from stepwell_meta.testing import count_calls


def calls_of_passes(layers: int, config: PassConfig, passes: list[Any]) -> int:
    """How many Python functions the passes call: a measure of work that no load on the machine changes."""
    inputs = {"x": torch.randn(2, 3), "y": torch.randn(2, 3)}
    compiler = GraphCompiler(support.MLP(*[3] * (layers + 1)), support.mse_loss, config, passes=passes)
    compiler.compile(**inputs)
    joint = trace(support.MLP(*[3] * (layers + 1)), support.mse_loss, inputs)
    return count_calls(lambda: compiler.build(joint))


@pytest.mark.parametrize(
    ("config", "passes"),
    [
        (PassConfig(), None),
        (PassConfig(bucket_by="bytes"), None),
        (PassConfig(prefetch=100), [OverlapPass(costs=RooflineCosts(link=1e3), max_bytes=100)]),
    ],
    ids=["modules", "bytes", "costs"],
)
def test_a_graph_four_times_as_long_takes_about_four_times_the_work(config: PassConfig, passes: Any) -> None:
    """A bucket asked for the looks of all members once for each of them, and a gather that nothing hides for the costs of the
    whole graph: 15,000 nodes took 16 seconds, half of them for that."""
    with fake_world(4):
        made = default_passes(config) if passes is None else [DataParallelPass(), ReshardPass(), BucketPass(), *passes]
        small, large = (calls_of_passes(layers, config, list(made)) for layers in (16, 64))
    assert large < 4.3 * small
