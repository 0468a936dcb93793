from __future__ import annotations

from typing import Any

import pytest
import torch

from stepwell_graphpasses import PassConfig
from stepwell_graphpasses.exceptions import ConfigError


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("fsdp", "fsdp"),
        ("ddp", "ddp"),
        ("hsdp", "hsdp"),
        ("fully_shard", "fsdp"),
        ("replicate", "ddp"),
        ("hybrid_shard", "hsdp"),
        ("  FSDP ", "fsdp"),
        ("Fully_Shard", "fsdp"),
        ("HYBRID_SHARD\n", "hsdp"),
    ],
)
def test_b01_mode_names(name: str, mode: str) -> None:
    assert PassConfig(dp_mode=name).dp_mode == mode


@pytest.mark.parametrize("name", [None, 3, True, b"fsdp", ["fsdp"]])
def test_b01_a_mode_that_is_no_string_is_refused_by_type(name: Any) -> None:
    with pytest.raises(ConfigError, match=type(name).__name__) as error:
        PassConfig(dp_mode=name)
    assert error.value.field == "dp_mode"


@pytest.mark.parametrize("name", ["", "zero3", "fsdp2", "fsdp,ddp"])
def test_b01_an_unknown_mode_is_refused_naming_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=r"fsdp.*ddp.*hsdp"):
        PassConfig(dp_mode=name)


def test_b02_defaults() -> None:
    config = PassConfig()
    assert (config.fsdp_degree, config.dp_replicate_degree, config.pp_degree) == (None, None, None)
    assert (config.tp_size, config.pp_enabled, config.pp_microbatch_size, config.pp_schedule) == (1, False, 1, "gpipe")


WRONG = [
    *(("fsdp_degree", value) for value in (0, -1, 1.5, "2", True)),
    *(("dp_replicate_degree", value) for value in (0, -1, "2")),
    *(("tp_size", value) for value in (0, None, 2.0)),
    *(("pp_enabled", value) for value in (1, None, "yes")),
    *(("pp_degree", value) for value in (0, "2", 2)),  # 2: without pp_enabled
    *(("pp_microbatch_size", value) for value in (0, None, 1.0)),
    *(("pp_schedule", value) for value in ("", None, 3)),
    *(
        ("reshard_after_forward", value)
        for value in (None, 1, "yes", {"layers": 1}, {3: True}, {"a..b": True}, {"": False})
    ),
    *(("param_dtype", value) for value in (torch.int32, "int8", "bf17", 16)),
    *(("reduce_dtype", value) for value in (torch.bool, "long", object())),
    *(("reduce", value) for value in ("mean", 0, -2.0, float("nan"), float("inf"), None, True)),
    *(("bucket_by", value) for value in ("layer", None)),
    *(("bucket_mb", value) for value in (0, -1, None, "25", True)),
    *(("prefetch", value) for value in (-1, None, 1.0)),
    *(("min_shard_numel", value) for value in (-1, None)),
    *(("unused", value) for value in ("zero", None)),
    *(("grad_sync", value) for value in ("full", None)),
    *(("pass_backend", value) for value in ("inductor", None, True)),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_b02_each_field_is_checked_when_made_and_when_changed(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as made:
        PassConfig(**{field: value})
    with pytest.raises(ConfigError, match=field) as changed:
        PassConfig().evolve(**{field: value})
    assert made.value.field == changed.value.field == field


def test_b02_every_field_has_a_wrong_value_above() -> None:
    import attrs

    assert {field.name for field in attrs.fields(PassConfig)} - {"dp_mode"} == {field for field, _ in WRONG}


@pytest.mark.parametrize(
    ("mode", "fields", "message"),
    [
        ("ddp", {"fsdp_degree": 2}, "ddp shards nothing"),
        ("ddp", {"grad_sync": "scatter"}, "ddp has none"),
        ("fsdp", {"dp_replicate_degree": 2}, "use hsdp"),
    ],
)
def test_b02_fields_that_contradict_the_mode_are_refused(mode: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PassConfig(dp_mode=mode, **fields)
    with pytest.raises(ConfigError, match=message):
        PassConfig(dp_mode="hsdp", **fields).evolve(dp_mode=mode)


def test_b02_an_unknown_field_is_refused_naming_the_fields() -> None:
    with pytest.raises(ConfigError, match=r"no field 'bucket_size'.*bucket_mb"):
        PassConfig().evolve(bucket_size=3)


def test_a_bucket_may_have_no_limit() -> None:
    assert PassConfig(bucket_mb=float("inf")).bucket_mb == float("inf")


def test_a_config_is_frozen_and_hashable() -> None:
    import attrs

    config = PassConfig(reshard_after_forward={"layers.3": False})
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.tp_size = 2  # type: ignore[misc]
    assert hash(config) == hash(PassConfig(reshard_after_forward={"layers.3": False}))


def test_dtypes_by_name() -> None:
    assert PassConfig(param_dtype="bfloat16", reduce_dtype="torch.float32") == PassConfig(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )


def test_reshard_per_module_pattern_the_last_one_decides() -> None:
    config = PassConfig(reshard_after_forward={"layers.*": True, "layers.3": False})
    assert config.reshards("layers.2.weight")
    assert not config.reshards("layers.3.weight")
    assert config.reshards("head.weight")
    assert not PassConfig(reshard_after_forward=False).reshards("head.weight")
