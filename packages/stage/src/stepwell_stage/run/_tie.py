"""One parameter on several stages.

In one process a tied parameter is one tensor, and its gradient is the sum over its uses. Here each rank that holds it has a copy.
Copies start equal, and get equal gradients::

    before a step   the gradient so far, the same sum on every rank, is put aside
    the step        each rank accumulates what its own stages contribute
    after it        contributions are exchanged, added in the order of the stages, and the sum joins what was put aside

So a contribution is counted once however many steps are accumulated, and every rank adds the same numbers in the same order:
gradients, and after an optimizer step parameters, are equal to the last bit. Optimizers must be set up alike on all holders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stepwell_meta import TensorMeta, decode, diff, encode, extract_meta
from stepwell_p2p import Edge, Op, OpKind, Recv, Send

from ..exceptions import StageUsageError
from ._executor import Executor
from ._stage import PipelineStage
from ._whole import TIE, TIED_GRADS, Word, decide, find, module_of


@attrs.frozen
class TiedGroup:
    """A tensor that several stages hold.

    Attributes:
        name: what it is called.
        holders: stage and the name in that stage's module, of each holder, ascending. The first one's values count.
    """

    name: str
    holders: tuple[tuple[int, str], ...]

    @property
    def owner(self) -> int:
        """The stage whose values every copy starts with."""
        return self.holders[0][0]


def tie(executor: Executor, groups: Mapping[str, Sequence[tuple[int, str]]]) -> Tie:
    """Keep parameters that are used on several stages equal, as one tensor in one process is.

    A collective of all ranks of the pipeline, called with the same groups on each, in any order, before optimizers are made.
    From then on every :meth:`Executor.step` sums the gradients of each group across ranks. Holders on one rank become one
    shared ``nn.Parameter``, with no communication. Buffers can be tied too: they start equal, and have no gradients.

    Copies start with the values of the group's lowest stage.

    Example::

        tie(executor, {"embedding": [(0, "embedding.weight"), (3, "head.weight")]})

    Args:
        executor: runs this rank's stages.
        groups: for each tied tensor, under any name, where it is: stage, and the parameter's name in that stage's module.

    Raises:
        StageUsageError: on every rank alike, if the ranks were given different groups, or a parameter is missing, tied already,
            on the meta device, or different in shape, dtype, placements or ``requires_grad`` from the others of its group.
    """
    declared = tuple(
        TiedGroup(name, tuple(sorted((stage, parameter) for stage, parameter in groups[name])))
        for name in sorted(groups)
    )
    own: dict[str, list[_Holder]] = {}
    problem: str | None = None
    looks: tuple[Any, ...] = ()
    try:
        own = {group.name: _own_holders(executor, group) for group in _checked(declared, executor)}
        looks = tuple(
            (group, holder.stage.stage_index, holder.name, extract_meta(holder.tensor))
            for group, holders in own.items()
            for holder in holders
        )
    except StageUsageError as error:
        problem = str(error)
    word = encode((problem, tuple((group.name, group.holders) for group in declared), looks))
    payload, _ = decide(executor.transport, (word, ()), _verdict)
    verdict = decode(payload)
    if verdict is not None:
        raise StageUsageError(verdict)
    for group in declared:
        _share(own[group.name])
        for holder in own[group.name]:
            holder.stage.tied[holder.name] = group
    for stage in executor.stages:
        stage.to_tie = tuple(name for name in stage.to_tie if name not in groups)
    tied = Tie(executor, declared, {name: holders[0].tensor for name, holders in own.items() if holders})
    tied.broadcast()
    executor.around_step.append(tied._around_step)
    return tied


class Tie:
    """Tied tensors of one executor; made by :func:`tie`. Mutable: it holds this rank's copies.

    Attributes:
        groups: what is tied, by name.
    """

    def __init__(self, executor: Executor, groups: Sequence[TiedGroup], own: Mapping[str, torch.Tensor]) -> None:
        self.groups = tuple(groups)
        self._executor = executor
        self._transport = executor.transport
        self._own = own
        rank, ranks = self._transport.rank, executor.plan.placement.ranks
        # What this rank holds and others do too: number, group, tensor, and the ranks in the order of their first stages.
        self._joint: list[tuple[int, TiedGroup, torch.Tensor, list[int]]] = []
        for number, group in enumerate(self.groups):
            holding = list(dict.fromkeys(ranks[stage] for stage, _ in group.holders))
            if rank in holding and len(holding) > 1:
                self._joint.append((number, group, own[group.name], holding))

    def broadcast(self) -> None:
        """Give every copy the values of its group's lowest stage, as after loading or initialising parameters anew.

        A collective of the ranks that hold a copy.
        """
        rank = self._transport.rank
        batch: list[Send | Recv] = []
        targets = []
        for number, group, _, holding in self._joint:
            local = _local(self._copies(group)[0])
            if holding[0] == rank:
                batch += [Send(self._op(group, rank, peer, TIE, number), local) for peer in holding[1:]]
            else:
                batch.append(Recv(self._op(group, holding[0], rank, TIE, number), _look(local)))
                targets.append(local)
        received = self._transport.post(batch).wait() if batch else ()
        for target, value in zip(targets, received, strict=True):
            target.copy_(value)
        for group in self.groups:
            copies = list(map(_local, self._copies(group)))
            for other in copies[1:]:
                other.copy_(copies[0])

    @contextmanager
    def _around_step(self) -> Iterator[None]:
        """Around a step: see the module's docstring."""
        self._check_still_tied()
        trained = [joint for joint in self._joint if isinstance(joint[2], nn.Parameter)]
        before = [tensor.grad for _, _, tensor, _ in trained]
        for _, _, tensor, _ in trained:
            tensor.grad = None
        try:
            yield
        except BaseException:
            for (_, _, tensor, _), grad in zip(trained, before, strict=True):
                tensor.grad = grad
            raise
        if trained:
            self._exchange(trained, before)

    def _exchange(
        self,
        trained: Sequence[tuple[int, TiedGroup, torch.Tensor, list[int]]],
        before: Sequence[torch.Tensor | None],
    ) -> None:
        """Sum this step's gradients over the holders' ranks.

        Every pair of ranks that share something exchanges one message that says which of its gradients exist, since one that
        no holder has is to stay None, and the gradients, zeros for those that do not.
        """
        rank = self._transport.rank
        peers = sorted({peer for *_, holding in trained for peer in holding} - {rank})
        contributions = [self._contribution(group, tensor) for _, group, tensor, _ in trained]
        batch: list[Send | Recv] = []
        slots: list[tuple[int, int | None]] = []  # of each receive, the peer and the entry, None for what exists
        for peer in peers:
            together = [index for index, (*_, holding) in enumerate(trained) if peer in holding]
            exist = torch.tensor([contributions[index] is not None for index in together])
            first = trained[together[0]][1]
            batch.append(Send(self._op(first, rank, peer, TIED_GRADS, 0), exist, owned=True))
            batch.append(Recv(self._op(first, peer, rank, TIED_GRADS, 0), TensorMeta.from_tensor(exist)))
            slots.append((peer, None))
            for index in together:
                number, group, tensor, _ = trained[index]
                grad = contributions[index]
                local = _local(tensor)
                batch.append(
                    Send(
                        self._op(group, rank, peer, TIED_GRADS, 1 + number),
                        torch.zeros_like(local) if grad is None else grad,
                    )
                )
                batch.append(Recv(self._op(group, peer, rank, TIED_GRADS, 1 + number), _look(local)))
                slots.append((peer, index))
        values = dict(zip(slots, self._transport.post(batch).wait(), strict=True))
        exists: dict[tuple[int, int], bool] = {}
        for peer in peers:
            together = [index for index, (*_, holding) in enumerate(trained) if peer in holding]
            exists |= {(peer, i): yes for i, yes in zip(together, values[peer, None].tolist(), strict=True)}
        for index, (_, _, tensor, holding) in enumerate(trained):
            grads = [
                contributions[index] if peer == rank else values[peer, index] if exists[peer, index] else None
                for peer in holding
            ]
            _accumulate(tensor, before[index], [grad for grad in grads if grad is not None])

    def _contribution(self, group: TiedGroup, tensor: torch.Tensor) -> torch.Tensor | None:
        grad = tensor.grad
        if grad is None:
            return None
        if isinstance(grad, DTensor) and isinstance(tensor, DTensor) and grad.placements != tensor.placements:
            grad = grad.redistribute(placements=tensor.placements)
        local = _local(grad)
        if local.layout is not torch.strided:
            local = local.to_dense()
        if local.dtype != tensor.dtype:
            self._give_up(
                f"the gradient of tied parameter {group.name!r} is {local.dtype}, but the parameter is {tensor.dtype};"
                " tied gradients cross in the parameter's dtype"
            )
        return local

    def _copies(self, group: TiedGroup) -> list[torch.Tensor]:
        """This rank's copies, of the lowest stage first: one, but forwards may put others in a buffer's place on each stage."""
        own = self._own.get(group.name)
        if own is None or isinstance(own, nn.Parameter):
            return [] if own is None else [own]
        stages = {stage.stage_index: stage for stage in self._executor.stages}
        found = [find(stages[index], name) for index, name in group.holders if index in stages]
        return list({id(one): one for one in found if one is not None}.values())

    def _check_still_tied(self) -> None:
        """That the modules hold the parameters that were tied, and not others made since."""
        for stage in self._executor.stages:
            for group in self.groups:
                if not isinstance(self._own.get(group.name), nn.Parameter):
                    continue
                for index, name in group.holders:
                    if index == stage.stage_index and find(stage, name) is not self._own[group.name]:
                        self._give_up(
                            f"{name!r} of stage {index} is not the tensor that was tied as {group.name!r}: it was replaced"
                            " since, as to_empty() and load_state_dict(assign=True) do; tie after that"
                        )

    def _give_up(self, reason: str) -> None:
        self._transport.abort(reason)  # the other ranks wait for this one in the step
        raise StageUsageError(reason)

    def _op(self, group: TiedGroup, source: int, destination: int, kind: int, index: int) -> Op:
        sends = source == self._transport.rank
        return Op(OpKind.SEND_F if sends else OpKind.RECV_F, Edge(source, destination), group.owner, kind, index)


@attrs.frozen(eq=False)
class _Holder:
    """A tied tensor of this rank."""

    stage: PipelineStage
    name: str
    tensor: torch.Tensor


def _checked(groups: Sequence[TiedGroup], executor: Executor) -> Sequence[TiedGroup]:
    """The groups, if they make sense as they are written."""
    num_stages = executor.plan.placement.num_stages
    seen: dict[tuple[int, str], str] = {}
    for group in groups:
        if len(group.holders) < 2:
            raise StageUsageError(f"tied {group.name!r} has {len(group.holders)} holders; name two or more to tie them")
        for stage, name in group.holders:
            if not 0 <= stage < num_stages:
                raise StageUsageError(f"tied {group.name!r} names stage {stage}, but there are {num_stages} stages")
            if (stage, name) in seen:
                raise StageUsageError(
                    f"{name!r} of stage {stage} is named twice, in {seen[stage, name]!r} and {group.name!r}; put all holders of"
                    " one tensor into one group, each once"
                )
            seen[stage, name] = group.name
    return groups


def _own_holders(executor: Executor, group: TiedGroup) -> list[_Holder]:
    """This rank's holders of a group."""
    stages = {stage.stage_index: stage for stage in executor.stages}
    own = []
    for index, name in group.holders:
        if index not in stages:
            continue
        stage = stages[index]
        tensor = find(stage, name)
        if tensor is None:
            raise StageUsageError(
                f"stage {index} has no parameter or buffer {name!r} to tie as {group.name!r}; names are those of the stage's"
                " module.named_parameters()"
            )
        if name in stage.tied:
            raise StageUsageError(f"{name!r} of stage {index} is tied already, as {stage.tied[name].name!r}")
        if tensor.is_meta:
            raise StageUsageError(
                f"{name!r} of stage {index} is on the meta device; a tie made there is lost when it is materialised:"
                " materialise first, then tie"
            )
        own.append(_Holder(stage, name, tensor))
    wrapped = any(
        isinstance(module, FSDPModule | DistributedDataParallel)
        for holder in own
        if isinstance(holder.stage.submodule, nn.Module)
        for module in holder.stage.submodule.modules()
    )
    if wrapped and len({id(holder.tensor) for holder in own}) > 1:
        raise StageUsageError(
            f"the holders of tied {group.name!r} on rank {executor.transport.rank} would become one parameter, but their modules"
            " are wrapped for data parallelism already, each with its own: use the same parameter in both before wrapping"
        )
    return own


def _verdict(words: Sequence[Word]) -> Word:
    """What is wrong, if anything, from the words of all ranks."""
    said = [decode(payload) for payload, _ in words]
    problems = [f"rank {rank}: {problem}" for rank, (problem, _, _) in enumerate(said) if problem is not None]
    if problems:
        return encode("; ".join(problems)), ()
    for rank, (_, declared, _) in enumerate(said):
        if declared != said[0][1]:
            theirs, ours = dict(declared), dict(said[0][1])
            odd = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
            return encode(
                f"ranks 0 and {rank} were given different groups to tie: {odd[0]!r} is {ours.get(odd[0])} on rank 0 and"
                f" {theirs.get(odd[0])} on rank {rank}; give the same to all"
            ), ()
    looks: dict[str, list[Any]] = {}
    for _, _, own in said:
        for group, *look in own:
            looks.setdefault(group, []).append(look)
    for group, found in looks.items():
        (stage, name, first), *others = sorted(found, key=lambda look: look[:2])
        for other_stage, other_name, other in others:
            differences = diff(first, other, ignore=("stride", "global_stride"))
            if differences:
                return encode(
                    f"tied {group!r}: {name!r} of stage {stage} and {other_name!r} of stage {other_stage} cannot be one tensor:"
                    f" {'; '.join(str(difference) for difference in differences)}"
                ), ()
    return encode(None), ()


def _share(holders: Sequence[_Holder]) -> None:
    """Let every holder of this rank hold the first one's tensor."""
    for holder in holders[1:]:
        if holder.tensor is not holders[0].tensor:
            path, _, leaf = holder.name.rpartition(".")
            setattr(module_of(holder.stage).get_submodule(path), leaf, holders[0].tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor, without grad, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _look(local: torch.Tensor) -> TensorMeta:
    return TensorMeta.from_tensor(local).as_dense()


def _accumulate(tensor: torch.Tensor, before: torch.Tensor | None, grads: Sequence[torch.Tensor]) -> None:
    """Make the gradient what it was before the step plus these, added in order."""
    if not grads:
        tensor.grad = before
        return
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    if before is not None:
        total = _local(before) + total
    if tensor.grad is None:
        tensor.grad = before if before is not None else torch.empty_like(tensor)
    elif tensor.grad.layout is not torch.strided:
        tensor.grad = torch.empty_like(tensor)
    _local(tensor.grad).copy_(total)
