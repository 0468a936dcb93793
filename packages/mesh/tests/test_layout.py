from __future__ import annotations

import pytest

from stepwell_mesh._layout import (
    CANDIDATES,
    MeshAxes,
    RoleAxes,
    axes_for_mode,
    data_axes,
    dedicated_axes,
    named_axes,
)
from stepwell_mesh.exceptions import AxisError


def axes(*names: str) -> MeshAxes:
    return MeshAxes(names, tuple(range(2, 2 + len(names))))


def test_mesh_axes_know_their_sizes() -> None:
    mesh = MeshAxes(("pp", "dp"), (2, 4))
    assert (mesh.size("pp"), mesh.size("dp")) == (2, 4)
    assert str(mesh) == "(pp=2, dp=4)"


def test_b06_candidates_are_tried_in_a_fixed_order() -> None:
    assert CANDIDATES == {
        "ddp": {"replicate": ("fsdp_replicate", "dp_replicate", "dp")},
        "hsdp": {
            "replicate": ("fsdp_replicate", "dp_replicate"),
            "shard": ("fsdp_shard", "fsdp", "dp", "dp_shard"),
        },
        "fsdp": {"shard": ("fsdp_shard", "dp", "fsdp", "dp_shard")},
    }


@pytest.mark.parametrize("mode", ["ddp", "hsdp", "fsdp"])
def test_b06_each_candidate_wins_over_all_later_ones(mode) -> None:
    for role, names in CANDIDATES[mode].items():
        others = {other: found[0] for other, found in CANDIDATES[mode].items() if other != role}
        for first in range(len(names)):
            mesh = axes("pp", *reversed(names[first:]), *others.values(), "tp")
            assert axes_for_mode(mode, mesh, named=RoleAxes()) == RoleAxes(**{role: names[first]}, **others)


@pytest.mark.parametrize(
    ("mode", "role", "names"),
    [
        ("ddp", "replicate", ("fsdp_shard", "tp")),
        ("hsdp", "replicate", ("dp", "tp")),
        ("hsdp", "shard", ("dp_replicate", "tp")),
        ("fsdp", "shard", ("dp_replicate", "tp")),
    ],
)
def test_b06_a_missing_axis_lists_the_axes_there_are(mode, role, names) -> None:
    with pytest.raises(AxisError) as caught:
        axes_for_mode(mode, axes(*names), named=RoleAxes())
    assert str(caught.value) == (
        f"mode '{mode}' needs a {role} axis, one of {', '.join(CANDIDATES[mode][role])}; the mesh has"
        f" ({names[0]}=2, {names[1]}=3). Rename an axis, or say which one it is with {role}_axis=…"
    )
    assert caught.value.axis_names == names


def test_a_named_axis_goes_before_the_candidates() -> None:
    mesh = axes("dp", "data", "tp")
    assert axes_for_mode("fsdp", mesh, named=RoleAxes(shard="data")) == RoleAxes(shard="data")
    assert axes_for_mode("hsdp", mesh, named=RoleAxes(replicate="data")) == RoleAxes(replicate="data", shard="dp")


def test_a_named_axis_never_serves_the_other_role_too() -> None:
    assert axes_for_mode("hsdp", axes("dp", "fsdp"), named=RoleAxes(replicate="dp")) == RoleAxes("dp", "fsdp")
    with pytest.raises(AxisError, match="mode 'hsdp' needs a shard axis"):
        axes_for_mode("hsdp", axes("dp", "tp"), named=RoleAxes(replicate="dp"))


def test_a_named_axis_that_is_not_there_is_refused() -> None:
    assert named_axes(axes("a", "b"), replicate="a", shard="b") == RoleAxes("a", "b")
    assert named_axes(axes("a", "b"), replicate=None, shard=None) == RoleAxes()
    with pytest.raises(AxisError, match=r"^shard_axis='data' is no axis of the mesh; its axes are \(dp=2, tp=3\)$"):
        named_axes(axes("dp", "tp"), replicate=None, shard="data")
    with pytest.raises(AxisError, match=r"^replicate_axis='data' is no axis of the mesh"):
        named_axes(axes("dp", "tp"), replicate="data", shard=None)


def test_one_axis_cannot_be_named_for_both_roles() -> None:
    with pytest.raises(
        AxisError, match=r"^replicate_axis and shard_axis must be two axes, got 'dp' for both \(axes \(dp=2\)\)$"
    ):
        named_axes(axes("dp"), replicate="dp", shard="dp")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("dp", "tp"), RoleAxes()),
        (("fsdp", "tp"), RoleAxes(shard="fsdp")),
        (("dp_replicate", "dp"), RoleAxes(replicate="dp_replicate", shard="dp")),
        (("dp_replicate", "dp_shard"), RoleAxes(replicate="dp_replicate", shard="dp_shard")),
        (("fsdp_replicate", "fsdp_shard", "tp"), RoleAxes(replicate="fsdp_replicate", shard="fsdp_shard")),
    ],
)
def test_dp_alone_says_nothing_and_beside_replicas_it_shards(names, expected) -> None:
    assert dedicated_axes(axes(*names), named=RoleAxes()) == expected


def test_a_named_axis_says_what_it_is() -> None:
    assert dedicated_axes(axes("dp", "tp"), named=RoleAxes(replicate="dp")) == RoleAxes(replicate="dp")
    assert dedicated_axes(axes("dp", "fsdp"), named=RoleAxes(replicate="dp")) == RoleAxes("dp", "fsdp")
    assert dedicated_axes(axes("data", "dp"), named=RoleAxes(replicate="data")) == RoleAxes("data", "dp")


def test_data_axes_are_those_that_a_mode_could_use() -> None:
    assert data_axes(axes("pp", "dp", "fsdp_shard", "tp", "dp_replicate")) == ("dp", "fsdp_shard", "dp_replicate")
