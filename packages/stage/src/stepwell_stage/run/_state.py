"""The model's and optimizers' state under the names of the whole model, whatever it was cut into.

Stages know what their parts are called in the whole model: a stage cut by :func:`split_sequential` keeps the names, others say
them (``PipelineStage(…, names={"0": "layers.4"})``). So a checkpoint does not know how many stages there were. Optimizer state
goes by name too, in the flat form of torch.distributed.checkpoint: ``state.<name>.<what>`` and ``param_groups.<name>.<option>``.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from stepwell_meta import MetadataError, decode, encode
from stepwell_p2p import Transport

from .._compat import plain_name
from ..exceptions import StageUsageError
from ._stage import PipelineStage
from ._whole import Stages, Word, collect, decide, module_of, stages_of, transport_of

Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def state_dict(stages: Stages, *, to: int | None = None, transport: Transport | None = None) -> dict[str, Any]:
    """Parameters and buffers of this rank's stages, under the names of the whole model.

    A collective of all ranks of the pipeline: they make sure that no two stages use one name. All ranks' dicts together are
    what ``model.state_dict()`` is in one process. Values are the stages' own tensors.

    Example::

        dcp.save({"model": state_dict(executor)}, checkpoint_id=path)

        state = {"model": state_dict(executor)}     # later, on any number of stages
        dcp.load(state, checkpoint_id=path)
        load_state_dict(executor, state["model"])

    Without a process group, one rank saves: ``dcp.save({"model": state_dict(executor, to=0)}, …)`` on rank 0; every rank loads
    for itself, with ``no_dist=True``.

    Args:
        stages: this rank's executor, stage or stages.
        to: gather the whole state on this rank, with whole tensors, on its device; the other ranks get nothing.
        transport: joins the ranks; by default that of the executor or the stages.

    Raises:
        StageUsageError: on every rank, if stages use one name for different things, or a value cannot be gathered.
    """
    joined = transport_of(stages, transport)
    own = stages_of(stages)
    _agree_on_names(own, joined)
    found: dict[str, Any] = {}
    for stage in own:
        found |= _renamed(stage, get_model_state_dict(module_of(stage)))
    return found if to is None else _gathered(found, joined, to)


def load_state_dict(
    stages: Stages, state: Mapping[str, Any], *, strict: bool = True, transport: Transport | None = None
) -> None:
    """Load parameters and buffers of this rank's stages from a state under the names of the whole model.

    A collective of all ranks of the pipeline. The state may be that of this rank's stages, or of the whole model.

    Args:
        stages: this rank's executor, stage or stages.
        state: what :func:`state_dict` gives, here or elsewhere, or ``model.state_dict()``.
        strict: whether it is an error that a stage's name is missing, or that a name belongs to no stage.
        transport: joins the ranks; by default that of the executor or the stages.

    Raises:
        StageUsageError: on every rank, before anything is loaded, for either of these; if a tensor has another shape; and if a
            tied parameter has different values under its different names.
    """
    joined = transport_of(stages, transport)
    own = stages_of(stages)
    _agree_on_names(own, joined)
    local = [(stage, get_model_state_dict(module_of(stage))) for stage in own]
    names = {_whole_name(stage, name) for stage, known in local for name in known}
    misfit = next((why for stage, known in local if (why := _misfit(stage, known, state)) is not None), None)
    values = tuple(
        (group.name, stage.stage_index, name, _checksum(state[_whole_name(stage, name)]))
        for stage in own
        for name, group in stage.tied.items()
        if isinstance(state.get(_whole_name(stage, name)), torch.Tensor)
    )
    word = encode((tuple(sorted(names)), tuple(sorted(state)) if strict else None, values, misfit))
    payload, _ = decide(joined, (word, ()), _loadable)
    problem = decode(payload)
    if problem is not None:
        raise StageUsageError(problem)
    for stage, known in local:
        part = {name: state[whole] for name in known if (whole := _whole_name(stage, name)) in state}
        set_model_state_dict(module_of(stage), part, options=StateDictOptions(strict=strict))


def optimizer_state_dict(
    stages: Stages, optimizers: Optimizers, *, to: int | None = None, transport: Transport | None = None
) -> dict[str, Any]:
    """The state of this rank's optimizers, by the names of the whole model.

    A collective of all ranks of the pipeline; a rank without optimizer passes an empty list. What has no state yet, because it
    has not been stepped, is given one, in the result only: that of a parameter before its first step, so that there is
    something to load into. Learning-rate schedulers have no state by parameter: save theirs beside this.

    Args:
        stages: this rank's executor, stage or stages.
        optimizers: of these stages' parameters; one or several.
        to: as in :func:`state_dict`.
        transport: as in :func:`state_dict`.

    Raises:
        StageUsageError: on every rank, if stages use one name for different things, or an optimizer has a parameter that no
            stage of its rank has.
    """
    joined = transport_of(stages, transport)
    own = stages_of(stages)
    several = _several(optimizers)
    _agree_on_names(own, joined, several)
    names = _names_of_parameters(own)
    found: dict[str, Any] = {}
    for optimizer in several:
        with _initialised(optimizer):
            packed = optimizer.state_dict()
        for group, live in zip(packed["param_groups"], optimizer.param_groups, strict=True):
            for number, parameter in zip(group["params"], live["params"], strict=True):
                for name in _known(names, parameter):
                    for what, value in packed["state"].get(number, {}).items():
                        found[f"state.{name}.{what}"] = value
                    for option, value in group.items():
                        if option != "params":
                            found[f"param_groups.{name}.{option}"] = value
    return found if to is None else _gathered(found, joined, to)


def load_optimizer_state_dict(stages: Stages, optimizers: Optimizers, state: Mapping[str, Any]) -> None:
    """Load the state of this rank's optimizers from one by the names of the whole model.

    Args:
        stages: this rank's executor, stage or stages.
        optimizers: of these stages' parameters; one or several.
        state: what :func:`optimizer_state_dict` gives, here or elsewhere; that of other stages is passed over.

    Raises:
        StageUsageError: a parameter is not in the state, or parameters of one group have different options there.
    """
    names = _names_of_parameters(stages_of(stages))
    every = {name for known in names.values() for name in known}
    by_name: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        while name and name not in every:  # what a parameter's state is called may have dots
            name, _, more = name.rpartition(".")
            what = f"{more}.{what}"
        if name and kind in by_name:
            by_name[kind].setdefault(name, {})[what] = value
    for optimizer in _several(optimizers):
        packed = optimizer.state_dict()
        filled: dict[int, Any] = {}
        for group, live in zip(packed["param_groups"], optimizer.param_groups, strict=True):
            options: dict[str, Any] | None = None
            for number, parameter in zip(group["params"], live["params"], strict=True):
                saved = [name for name in _known(names, parameter) if name in by_name["param_groups"]]
                if not saved:
                    raise StageUsageError(
                        f"the state has nothing of {_known(names, parameter)[0]!r}; it must hold that of every parameter of the"
                        " optimizer"
                    )
                if saved[0] in by_name["state"]:
                    filled[number] = by_name["state"][saved[0]]
                found = by_name["param_groups"][saved[0]]
                if options is not None and not _same(options, found):
                    raise StageUsageError(
                        f"{saved[0]!r} is in one parameter group with others here, but was saved with other options: {found} and"
                        f" {options}; make the groups as they were, or load them with the same options"
                    )
                options = found
            group.update(options or {})
        optimizer.load_state_dict({**packed, "state": filled})


def _whole_name(stage: PipelineStage, name: str) -> str:
    """What a part of a stage is called in the whole model, by its longest prefix that the stage has a name for."""
    prefix, rest = name, ""
    while prefix and prefix not in stage.names:
        prefix, _, last = prefix.rpartition(".")
        rest = f".{last}{rest}"
    return stage.names[prefix] + rest if prefix in stage.names else name


def _renamed(stage: PipelineStage, values: Mapping[str, Any]) -> dict[str, Any]:
    return {_whole_name(stage, name): value for name, value in values.items()}


def _agree_on_names(
    stages: Sequence[PipelineStage], transport: Transport, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> None:
    """Make sure that no two stages have one name for different things, and that optimizers' parameters have names."""
    names: tuple[Any, ...] = ()
    problem: str | None = None
    try:
        names = tuple(
            (_whole_name(stage, name), stage.stage_index, stage.tied[name].name if name in stage.tied else None)
            for stage in stages
            for name in get_model_state_dict(module_of(stage))
        )
        known = _names_of_parameters(stages)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    _known(known, parameter)
    except StageUsageError as error:
        problem = str(error)
    payload, _ = decide(transport, (encode((problem, names)), ()), _distinct)
    found = decode(payload)
    if found is not None:
        raise StageUsageError(found)


def _distinct(words: Sequence[Word]) -> Word:
    """Which name is used twice, if one is."""
    seen: dict[str, tuple[int, str | None]] = {}
    for rank, (payload, _) in enumerate(words):
        problem, names = decode(payload)
        if problem is not None:
            return encode(f"rank {rank}: {problem}"), ()
        for name, stage, tied in names:
            other, other_tied = seen.setdefault(name, (stage, tied))
            if other != stage and (tied is None or tied != other_tied):
                return encode(
                    f"stages {other} and {stage} both call something {name!r}, and one would replace the other in a checkpoint:"
                    ' say what it is in the whole model, PipelineStage(..., names={"0": "layers.4"}), or tie it'
                ), ()
    return encode(None), ()


def _loadable(words: Sequence[Word]) -> Word:
    """Why the ranks' states cannot be loaded into their stages, if they cannot."""
    said = [decode(payload) for payload, _ in words]
    names = {name for own, *_ in said for name in own}
    for rank, (own, given, _, misfit) in enumerate(said):
        if misfit is not None:
            return encode(f"rank {rank}: {misfit}"), ()
        if given is None:
            continue
        missing = sorted(set(own) - set(given))
        if missing:
            return encode(f"rank {rank}: the state lacks {_some(missing)}; give what is there with strict=False"), ()
        unknown = sorted(set(given) - names)
        if unknown:
            return encode(
                f"rank {rank}: no stage has {_some(unknown)} of the state; leave it out, or pass strict=False"
            ), ()
    tied: dict[str, tuple[int, str, int]] = {}
    for _, _, values, _ in said:
        for group, stage, name, checksum in values:
            other, other_name, first = tied.setdefault(group, (stage, name, checksum))
            if first != checksum:
                return encode(
                    f"{other_name!r} of stage {other} and {name!r} of stage {stage} are tied as {group!r}, but have different"
                    " values in the state: give both the same"
                ), ()
    return encode(None), ()


def _misfit(stage: PipelineStage, known: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """Which tensor of the state has another shape than the stage's, if one has."""
    for name, here in known.items():
        given = state.get(_whole_name(stage, name))
        if isinstance(here, torch.Tensor) and isinstance(given, torch.Tensor) and given.shape != here.shape:
            return (
                f"{_whole_name(stage, name)!r} of stage {stage.stage_index} has shape {tuple(here.shape)}, but"
                f" {tuple(given.shape)} in the state: give the state of this model"
            )
    return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _checksum(tensor: torch.Tensor) -> int:
    local = tensor.detach()
    local = (local.to_local() if isinstance(local, DTensor) else local).cpu().contiguous()
    return zlib.crc32(ctypes.string_at(local.data_ptr(), local.numel() * local.element_size()))


def _names_of_parameters(stages: Sequence[PipelineStage]) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter, in the whole model."""
    found: dict[nn.Parameter, list[str]] = {}
    for stage in stages:
        for name, parameter in module_of(stage).named_parameters(remove_duplicate=False):
            found.setdefault(parameter, []).append(_whole_name(stage, plain_name(name)))
    return found


def _known(names: Mapping[nn.Parameter, list[str]], parameter: nn.Parameter) -> list[str]:
    if parameter not in names:
        raise StageUsageError(
            f"an optimizer has a parameter of shape {tuple(parameter.shape)} that no stage of this rank has; make the optimizer"
            " from executor.parameters(), after tying"
        )
    return names[parameter]


def _several(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


@contextlib.contextmanager
def _initialised(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Meanwhile parameters that have no state yet have that of one before its first step.

    The optimizer makes it: a step with zero gradients, a learning rate of 0 and no weight decay, which some optimizers add to the
    gradient, changes no parameter and gathers nothing. Then the count of steps is taken back, and what else torch's optimizers
    had otherwise before (:data:`_BEFORE`).
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    new = [parameter for parameter in parameters if parameter.requires_grad and not optimizer.state.get(parameter)]
    if not new:
        yield
        return
    grads = [parameter.grad for parameter in parameters]
    options: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "weight_decay") if name in group} for group in optimizer.param_groups
    ]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
        for group, known in zip(optimizer.param_groups, options, strict=True):
            for name, value in known.items():
                group[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for group, known in zip(optimizer.param_groups, options, strict=True):
            group.update(known)
    before = next((values for kind, values in _BEFORE.items() if isinstance(optimizer, kind)), {})
    for group in optimizer.param_groups:
        for parameter in set(group["params"]) & set(new):
            state = optimizer.state[parameter]
            for name, value in {"step": 0, **before}.items():
                if name in state:
                    first = group[value] if isinstance(value, str) else value
                    old = state[name]
                    state[name] = torch.full_like(old, first) if isinstance(old, torch.Tensor) else first
    try:
        yield
    finally:
        for parameter in new:
            optimizer.state.pop(parameter, None)


# What a step moves even with zero gradients and no learning rate: its value before, or the option that gives it.
_BEFORE: dict[type[torch.optim.Optimizer], dict[str, float | str]] = {
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.Rprop: {"step_size": "lr"},
    torch.optim.ASGD: {"eta": "lr", "ax": 0.0},
}


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else bool(value == second[key])
        for key, value in first.items()
    )


def _gathered(found: Mapping[str, Any], transport: Transport, to: int) -> dict[str, Any]:
    """All ranks' entries on rank ``to``, DTensors whole."""
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}
    tensors = {key: value.detach() for key, value in whole.items() if isinstance(value, torch.Tensor)}
    others = tuple((key, value) for key, value in whole.items() if key not in tensors)
    payload, problem = b"", None
    try:
        payload = encode((tuple(tensors), others))
    except MetadataError as error:
        problem = (
            f"only tensors, numbers, texts and tuples of them can be gathered: {error}; save each rank's part instead"
        )
    said, _ = decide(transport, (encode(problem), ()), _first_problem)
    if (refused := decode(said)) is not None:
        raise StageUsageError(refused)
    gathered: dict[str, Any] = {}
    for said, values in collect(transport, (payload, list(tensors.values())), to=to) or ():
        names, plain = decode(said)
        gathered |= dict(zip(names, values, strict=True)) | dict(plain)
    return gathered


def _first_problem(words: Sequence[Word]) -> Word:
    problems = [f"rank {rank}: {said}" for rank, (word, _) in enumerate(words) if (said := decode(word)) is not None]
    return encode(problems[0] if problems else None), ()
