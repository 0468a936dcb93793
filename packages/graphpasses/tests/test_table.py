from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stepwell_graphpasses import PassConfig, shard
from stepwell_graphpasses._table import parameter_table, plan_layouts, shard_rows
from stepwell_graphpasses.exceptions import ModelStateError, PlanError


@pytest.mark.parametrize(
    ("rows", "degree", "expected"), [(7, 2, (4, 3)), (3, 4, (1, 1, 1, 0)), (8, 4, (2, 2, 2, 2)), (5, 4, (2, 2, 1, 0))]
)
def test_s13_rows_of_each_rank(rows: int, degree: int, expected: tuple[int, ...]) -> None:
    assert shard_rows(rows, degree) == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 9))
def test_s13_rows_are_those_of_chunk(rows: int, degree: int) -> None:
    chunks = [len(part) for part in torch.arange(rows).chunk(degree)]
    assert shard_rows(rows, degree) == (*chunks, *[0] * (degree - len(chunks)))


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3, bias=False), nn.Linear(7, 3, bias=False))
    net[2].weight = net[1].weight
    net[0].bias.requires_grad_(False)
    net.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    return net


def test_a_table_has_each_parameter_once_with_all_its_names() -> None:
    table = parameter_table(model())
    assert table.names == ("scale", "0.weight", "0.bias", "1.weight")
    assert table["2.weight"] is table["1.weight"]
    assert table["1.weight"].aliases == ("2.weight",)
    assert [p.trainable for p in table] == [True, True, False, True]
    assert table["scale"].dtype == torch.float64


def test_param_dtype_changes_what_is_computed_with_and_not_what_is_stored() -> None:
    table = parameter_table(model(), param_dtype=torch.bfloat16)
    assert {p.compute_dtype for p in table} == {torch.bfloat16}
    assert table["0.weight"].dtype == torch.float32


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(ModelStateError, match="call the lazy module once"):
        parameter_table(nn.LazyLinear(3))


def test_layouts_say_why() -> None:
    layouts = plan_layouts(parameter_table(model()), shard("0", "2"), PassConfig(), degree=2)
    assert layouts["0.weight"].rows == (4, 3)
    assert layouts["0.weight"].padded
    assert "(4, 3), padded to 4" in layouts["0.weight"].reason
    assert layouts["1.weight"].rows == (2, 1)  # through its alias
    assert layouts["1.weight"].unit == "2"
    assert not layouts["scale"].sharded
    assert "no pattern" in layouts["scale"].reason


def test_scalars_empty_and_tiny_parameters_stay_whole() -> None:
    net = model()
    net.empty = nn.Parameter(torch.empty(0, 3))
    layouts = plan_layouts(parameter_table(net), shard("**"), PassConfig(min_shard_numel=10), degree=2)
    assert "a scalar has no rows" in layouts["scale"].reason
    assert "no elements" in layouts["empty"].reason
    assert "below min_shard_numel=10" in layouts["0.bias"].reason
    assert layouts["0.weight"].sharded


def test_ddp_and_degree_one_keep_everything_whole() -> None:
    table = parameter_table(model())
    for config, degree in ((PassConfig(dp_mode="ddp"), 1), (PassConfig(), 1)):
        assert not any(layout.sharded for layout in plan_layouts(table, shard("**"), config, degree=degree).values())


def test_a_reshard_pattern_that_names_nothing_is_refused() -> None:
    config = PassConfig(reshard_after_forward={"layers.3": False})
    with pytest.raises(PlanError, match=r"reshard_after_forward pattern 'layers\.3'"):
        plan_layouts(parameter_table(model()), shard("**"), config, degree=2)
