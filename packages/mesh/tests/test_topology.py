from __future__ import annotations

import itertools

import pytest

from stepwell_mesh import Degrees, normalize_dp_mode, resolve_hsdp_degrees
from stepwell_mesh._layout import MeshAxes, RoleAxes
from stepwell_mesh._topology import (
    AxisPlan,
    DeclaredSizes,
    declared_by_axes,
    plan_axes,
    plan_world,
    reconcile,
    refuse_other_parallelism,
    resolve_degrees,
)
from stepwell_mesh.exceptions import AxisError, DegreesError, ExternalMeshError, ModeError

CHOICES = "fsdp (or fully_shard), ddp (or replicate), hsdp (or hybrid_shard)"


# Modes


@pytest.mark.parametrize(
    ("given_mode", "mode"),
    [
        ("fsdp", "fsdp"),
        ("ddp", "ddp"),
        ("hsdp", "hsdp"),
        ("fully_shard", "fsdp"),
        ("replicate", "ddp"),
        ("hybrid_shard", "hsdp"),
        ("  FSDP\n", "fsdp"),
        ("Hybrid_Shard ", "hsdp"),
        ("f s d p", "fsdp"),
    ],
)
def test_b01_modes_and_aliases_in_any_case_with_any_blanks(given_mode, mode) -> None:
    assert normalize_dp_mode(given_mode) == mode


def test_b01_an_unknown_mode_names_the_choices() -> None:
    for wrong in ("zero3", "", "fsdp2", "hybrid-shard"):
        with pytest.raises(ModeError) as caught:
            normalize_dp_mode(wrong)
        assert str(caught.value) == f"unknown data-parallel mode {wrong!r}; choose {CHOICES}"
        assert caught.value.mode == wrong


@pytest.mark.parametrize(("wrong", "kind"), [(None, "NoneType"), (3, "int"), (b"fsdp", "bytes")])
def test_b01_a_mode_that_is_no_string_names_the_choices(wrong, kind) -> None:
    with pytest.raises(ModeError) as caught:
        normalize_dp_mode(wrong)
    assert str(caught.value) == f"the data-parallel mode must be a string, {CHOICES}; got {wrong!r} ({kind})"


# Degrees


@pytest.mark.parametrize(
    ("world", "shard", "replicate", "expected"),
    [
        (8, 4, None, Degrees(shard=4, replicate=2)),
        (8, None, 4, Degrees(shard=2, replicate=4)),
        (8, 2, 4, Degrees(shard=2, replicate=4)),
        (8, 8, None, Degrees(shard=8, replicate=1)),
        (8, None, 8, Degrees(shard=1, replicate=8)),
        (1, 1, 1, Degrees(shard=1, replicate=1)),
    ],
)
def test_b05_the_missing_degree_is_derived(world, shard, replicate, expected) -> None:
    assert resolve_hsdp_degrees(world, shard, replicate) == expected
    assert resolve_hsdp_degrees(world, shard=shard, replicate=replicate).total == world


@pytest.mark.parametrize(
    ("world", "shard", "replicate", "sentence"),
    [
        (8, None, None, "hsdp on 8 ranks needs a shard degree, a replicate degree, or both; got neither"),
        (8, 3, None, "the shard degree must divide the number of ranks, but 3 does not divide 8"),
        (8, None, 5, "the replicate degree must divide the number of ranks, but 5 does not divide 8"),
        (8, 3, 4, "the shard degree must divide the number of ranks, but 3 does not divide 8"),
        (8, 16, None, "the shard degree must divide the number of ranks, but 16 does not divide 8"),
        (
            8,
            2,
            2,
            "shard degree times replicate degree must be the number of ranks, but 2 * 2 = 4, not 8; leave one out to have"
            " it derived",
        ),
        (8, 0, None, "the shard degree must be a positive integer, got 0"),
        (8, None, -2, "the replicate degree must be a positive integer, got -2"),
        (8, 4.0, None, "the shard degree must be a positive integer, got 4.0"),
        (8, True, 8, "the shard degree must be a positive integer, got True"),
        (0, 1, None, "the number of ranks must be a positive integer, got 0"),
        (None, 1, None, "the number of ranks must be a positive integer, got None"),
    ],
)
def test_b05_each_violation_has_its_own_sentence(world, shard, replicate, sentence) -> None:
    with pytest.raises(DegreesError) as caught:
        resolve_hsdp_degrees(world, shard, replicate)
    assert str(caught.value) == sentence
    assert (caught.value.world_size, caught.value.shard, caught.value.replicate) == (world, shard, replicate)


@pytest.mark.parametrize("world", range(1, 17))
def test_b05_degrees_fill_the_world_exactly_or_are_refused(world) -> None:
    choices = [None, *range(1, 18)]
    for shard, replicate in itertools.product(choices, choices):
        possible = [
            (s, world // s)
            for s in range(1, world + 1)
            if world % s == 0 and shard in (None, s) and replicate in (None, world // s)
        ]
        if len(possible) == 1 and (shard, replicate) != (None, None):
            assert resolve_hsdp_degrees(world, shard, replicate) == Degrees(*possible[0])
        else:
            with pytest.raises(DegreesError):
                resolve_hsdp_degrees(world, shard, replicate)


@pytest.mark.parametrize(
    ("mode", "shard", "replicate", "expected"),
    [
        ("fsdp", None, None, Degrees(shard=8, replicate=1)),
        ("fsdp", 8, 1, Degrees(shard=8, replicate=1)),
        ("ddp", None, None, Degrees(shard=1, replicate=8)),
        ("ddp", 1, 8, Degrees(shard=1, replicate=8)),
        ("hsdp", 2, None, Degrees(shard=2, replicate=4)),
    ],
)
def test_b04_degrees_of_each_mode(mode, shard, replicate, expected) -> None:
    assert resolve_degrees(mode, 8, shard=shard, replicate=replicate) == expected


@pytest.mark.parametrize(
    ("mode", "shard", "replicate", "role", "needed", "asked"),
    [
        ("fsdp", 4, None, "shard", 8, 4),
        ("fsdp", None, 2, "replicate", 1, 2),
        ("ddp", 2, None, "shard", 1, 2),
        ("ddp", None, 4, "replicate", 8, 4),
    ],
)
def test_degrees_that_would_leave_gradients_unreduced_are_refused(mode, shard, replicate, role, needed, asked) -> None:
    with pytest.raises(DegreesError) as caught:
        resolve_degrees(mode, 8, shard=shard, replicate=replicate)
    assert str(caught.value) == (
        f"mode '{mode}' on 8 ranks has {role} degree {needed}, but {asked} was asked for; leave it out, or use mode 'hsdp'"
        " to have both shards and replicas"
    )


def test_degrees_of_any_mode_must_be_positive() -> None:
    with pytest.raises(DegreesError, match=r"^the replicate degree must be a positive integer, got 0$"):
        resolve_degrees("ddp", 8, replicate=0)


# Data parallelism that has all ranks


def test_b03_tensor_or_pipeline_parallelism_needs_an_external_mesh() -> None:
    refuse_other_parallelism(tp_size=1, pp_size=1)
    for tp, pp in ((2, 1), (1, 4), (2, 2), (0, 1)):
        with pytest.raises(ExternalMeshError) as caught:
            refuse_other_parallelism(tp_size=tp, pp_size=pp)
        assert str(caught.value) == (
            "without an external mesh every rank belongs to data parallelism, but tensor-parallel size"
            f" {tp} and pipeline-parallel size {pp} were asked for. Make a mesh with all the axes (for example"
            ' init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))) and pass it to'
            " topology_from_mesh"
        )


@pytest.mark.parametrize(
    ("mode", "degrees", "axes", "roles"),
    [
        ("fsdp", Degrees(8, 1), MeshAxes(("fsdp_shard",), (8,)), RoleAxes(shard="fsdp_shard")),
        ("ddp", Degrees(1, 8), MeshAxes(("fsdp_replicate",), (8,)), RoleAxes(replicate="fsdp_replicate")),
        (
            "hsdp",
            Degrees(2, 4),
            MeshAxes(("fsdp_replicate", "fsdp_shard"), (4, 2)),
            RoleAxes(replicate="fsdp_replicate", shard="fsdp_shard"),
        ),
    ],
)
def test_b04_own_mesh_of_each_mode(mode, degrees, axes, roles) -> None:
    assert plan_world(mode, degrees) == (axes, AxisPlan(mode, roles, degrees))


# Reconciliation

FSDP_TO_HSDP = (
    "mode 'fsdp' on a mesh that holds 2 replicas: using 'hsdp', so that gradients are also reduced across them. Ask for"
    " 'hsdp' to say so, or pass a mesh without a replicate axis"
)
HSDP_TO_FSDP = (
    "mode 'hsdp' on a mesh that holds one replica only: using 'fsdp'. Ask for 'fsdp' to say so, or pass a mesh with a"
    " replicate axis of 2 or more"
)


@pytest.mark.parametrize(
    ("mode", "replicate", "shard", "effective", "warning"),
    [
        ("fsdp", 1, 4, "fsdp", None),
        ("fsdp", 2, 2, "hsdp", FSDP_TO_HSDP),
        ("fsdp", 2, 1, "hsdp", FSDP_TO_HSDP),
        ("fsdp", None, 4, "fsdp", None),
        ("hsdp", 2, 2, "hsdp", None),
        ("hsdp", 1, 4, "fsdp", HSDP_TO_FSDP),
        ("hsdp", 1, 1, "fsdp", HSDP_TO_FSDP),
        ("hsdp", None, 4, "hsdp", None),
        ("hsdp", 2, 1, "hsdp", None),
        ("ddp", 4, 1, "ddp", None),
        ("ddp", 1, 1, "ddp", None),
        ("ddp", 4, None, "ddp", None),
        ("ddp", None, None, "ddp", None),
    ],
)
def test_b07_the_mode_follows_the_sizes(mode, replicate, shard, effective, warning) -> None:
    assert reconcile(mode, DeclaredSizes(replicate=replicate, shard=shard)) == (effective, warning)


@pytest.mark.parametrize(("replicate", "way_out"), [(1, "fsdp"), (None, "fsdp"), (2, "hsdp")])
def test_b07_ddp_is_refused_where_parameters_are_sharded(replicate, way_out) -> None:
    with pytest.raises(ModeError) as caught:
        reconcile("ddp", DeclaredSizes(replicate=replicate, shard=4))
    assert str(caught.value) == (
        "mode 'ddp' keeps whole parameters on every rank, but the mesh shards them over 4 ranks; use mode"
        f" '{way_out}', or pass a mesh whose shard size is 1"
    )
    assert caught.value.mode == "ddp"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (MeshAxes(("dp", "tp"), (4, 2)), DeclaredSizes()),
        (MeshAxes(("fsdp_replicate", "fsdp_shard", "tp"), (1, 4, 2)), DeclaredSizes(replicate=1, shard=4)),
        (MeshAxes(("dp_replicate", "dp"), (2, 4)), DeclaredSizes(replicate=2, shard=4)),
        (MeshAxes(("pp", "fsdp"), (2, 4)), DeclaredSizes(shard=4)),
    ],
)
def test_a_bare_mesh_says_by_its_axes_how_it_is_used(axes, expected) -> None:
    assert declared_by_axes(axes, named=RoleAxes()) == expected


# Plans on external meshes

NONE = RoleAxes()


def plan(mode, axes, *, named=NONE):
    """Plan on a bare mesh."""
    return plan_axes(mode, axes, declared=declared_by_axes(axes, named=named), named=named)


@pytest.mark.parametrize(
    ("mode", "axes", "expected"),
    [
        ("fsdp", MeshAxes(("pp", "dp", "tp"), (2, 4, 2)), AxisPlan("fsdp", RoleAxes(shard="dp"), Degrees(4, 1))),
        ("ddp", MeshAxes(("pp", "dp", "tp"), (2, 4, 2)), AxisPlan("ddp", RoleAxes(replicate="dp"), Degrees(1, 4))),
        (
            "hsdp",
            MeshAxes(("dp_replicate", "dp", "tp"), (2, 4, 2)),
            AxisPlan("hsdp", RoleAxes("dp_replicate", "dp"), Degrees(4, 2)),
        ),
        (
            "fsdp",
            MeshAxes(("fsdp_replicate", "fsdp_shard"), (2, 4)),
            AxisPlan("hsdp", RoleAxes("fsdp_replicate", "fsdp_shard"), Degrees(4, 2), FSDP_TO_HSDP),
        ),
        (
            "hsdp",
            MeshAxes(("fsdp_replicate", "fsdp_shard"), (1, 8)),
            AxisPlan("fsdp", RoleAxes(shard="fsdp_shard"), Degrees(8, 1), HSDP_TO_FSDP),
        ),
        (
            "ddp",
            MeshAxes(("fsdp_replicate", "fsdp_shard"), (8, 1)),
            AxisPlan("ddp", RoleAxes(replicate="fsdp_replicate"), Degrees(1, 8)),
        ),
    ],
)
def test_b06_degrees_come_from_the_axes(mode, axes, expected) -> None:
    assert plan(mode, axes) == expected


def test_b07_without_sizes_the_mode_stays_as_it_is() -> None:
    axes = MeshAxes(("fsdp_replicate", "fsdp_shard", "tp"), (2, 4, 2))
    for mode, roles, degrees in (
        ("fsdp", RoleAxes(shard="fsdp_shard"), Degrees(4, 1)),
        ("ddp", RoleAxes(replicate="fsdp_replicate"), Degrees(1, 2)),
        ("hsdp", RoleAxes("fsdp_replicate", "fsdp_shard"), Degrees(4, 2)),
    ):
        assert plan_axes(mode, axes, declared=None, named=NONE) == AxisPlan(mode, roles, degrees)


def test_b07_a_missing_axis_of_a_mode_that_nobody_asked_for_says_where_it_comes_from() -> None:
    axes = MeshAxes(("pp", "dp"), (2, 4))
    with pytest.raises(AxisError) as caught:
        plan_axes("fsdp", axes, declared=DeclaredSizes(replicate=2, shard=2), named=NONE)
    assert str(caught.value) == (
        f"{FSDP_TO_HSDP}. But mode 'hsdp' needs a replicate axis, one of fsdp_replicate, dp_replicate; the mesh has"
        " (pp=2, dp=4). Rename an axis, or say which one it is with replicate_axis=…"
    )
    assert caught.value.axis_names == ("pp", "dp")


def test_declared_sizes_must_be_those_of_the_axes() -> None:
    axes = MeshAxes(("dp", "cp", "tp"), (2, 2, 2))
    assert plan_axes("fsdp", axes, declared=DeclaredSizes(1, 2), named=NONE).degrees == Degrees(2, 1)
    with pytest.raises(AxisError) as caught:
        plan_axes("fsdp", axes, declared=DeclaredSizes(1, 4), named=NONE)
    assert str(caught.value) == (
        "dp_shard_size is 4, but the mesh's shard axis 'dp' has 2 ranks (axes (dp=2, cp=2, tp=2)); correct dp_shard_size,"
        " or pass the mesh that it belongs to"
    )
    with pytest.raises(AxisError, match=r"^dp_replicate_size is 4, but the mesh's replicate axis 'dp' has 2 ranks"):
        plan_axes("ddp", axes, declared=DeclaredSizes(4, 1), named=NONE)


@pytest.mark.parametrize(
    ("mode", "axes", "used", "forgotten"),
    [
        ("fsdp", MeshAxes(("dp", "fsdp_shard"), (2, 4)), "fsdp_shard", "dp"),
        ("fsdp", MeshAxes(("dp", "fsdp"), (4, 2)), "dp", "fsdp"),
        ("ddp", MeshAxes(("dp_replicate", "fsdp_replicate"), (2, 4)), "fsdp_replicate", "dp_replicate"),
        (
            "hsdp",
            MeshAxes(("fsdp_replicate", "dp", "fsdp_shard"), (2, 2, 2)),
            "fsdp_replicate and fsdp_shard",
            "dp",
        ),
    ],
)
def test_an_axis_along_which_nothing_would_be_reduced_is_refused(mode, axes, used, forgotten) -> None:
    with pytest.raises(AxisError) as caught:
        plan(mode, axes)
    assert str(caught.value) == (
        f"mode '{mode}' reduces gradients along {used} of the mesh {axes} only, so the {axes.size(forgotten)} ranks along"
        f" '{forgotten}' would drift apart. Pass a sub-mesh without that axis, or say which axes to use with"
        " replicate_axis=… and shard_axis=…"
    )


def test_an_unused_axis_of_size_one_is_no_harm() -> None:
    assert plan("fsdp", MeshAxes(("dp", "fsdp_shard"), (1, 4))).roles == RoleAxes(shard="fsdp_shard")


def test_named_axes_make_any_mesh_usable() -> None:
    mesh = MeshAxes(("outer", "inner", "tp"), (2, 4, 2))
    assert plan("fsdp", mesh, named=RoleAxes(shard="inner")).degrees == Degrees(4, 1)
    assert plan("ddp", mesh, named=RoleAxes(replicate="outer")).degrees == Degrees(1, 2)
    hybrid = plan("hsdp", mesh, named=RoleAxes(replicate="outer", shard="inner"))
    assert hybrid == AxisPlan("hsdp", RoleAxes("outer", "inner"), Degrees(4, 2))


def test_a_named_axis_takes_part_in_reconciliation() -> None:
    mesh = MeshAxes(("outer", "inner"), (2, 4))
    named = RoleAxes(replicate="outer", shard="inner")
    assert plan("fsdp", mesh, named=named) == AxisPlan("hsdp", named, Degrees(4, 2), FSDP_TO_HSDP)
    with pytest.raises(ModeError, match="shards them over 4 ranks"):
        plan("ddp", mesh, named=named)


def test_a_named_axis_is_never_dropped_in_silence() -> None:
    with pytest.raises(AxisError, match="the 2 ranks along 'outer' would drift apart"):
        plan_axes(
            "fsdp",
            MeshAxes(("outer", "inner"), (2, 4)),
            declared=None,
            named=RoleAxes(replicate="outer", shard="inner"),
        )
