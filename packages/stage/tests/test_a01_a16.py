"""What torch's eager stage does before and around computing, line by line; where ours does something better, the test says what.

Stages of one process share a rank, so values are handed over; what crosses between ranks is in the tests with workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage_support import Calls, X, prepare, scaled, stages_of
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from stepwell_meta.exceptions import PipeliningMetadataError
from stepwell_meta.testing import WorkerPool
from stepwell_p2p import C10dTransport, LoopbackFabric, Placement, Wire
from stepwell_stage import PipelineStage
from stepwell_stage.exceptions import StageUsageError


def two(*, first: Any = scaled, second: Any = scaled, **options: Any) -> tuple[PipelineStage, PipelineStage]:
    """Two stages on the one rank of this process, with the same options."""
    one, other = stages_of(first, second, options=[options] * 2)
    return one, other


def forward(stages: Sequence[PipelineStage], microbatch: int, *args: Any) -> Any:
    """A microbatch through stages of one rank, as torch's runtime does it."""
    value: Any = None
    for stage in stages:
        if not stage.is_first:
            stage.set_local_fwd_input(value, microbatch)
        value = stage.forward_one_chunk(microbatch, args if stage.is_first else (), {})
    return value


def backward(stages: Sequence[PipelineStage], microbatch: int, loss: torch.Tensor) -> None:
    for stage in reversed(stages):
        stage.backward_one_chunk(microbatch, loss=loss if stage.is_last else None)
        if not stage.is_first:
            stages[stage.stage_index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda w, x: w * x, lambda w, x: w * x),
        (lambda w, x: (w * x, x + 1), lambda w, a, b: w * a + 0 * b),
        (lambda w, x: [w * x, x + 1], lambda w, a, b: w * a + 0 * b),
        (lambda w, x: {"a": w * x, "n": [3, None]}, lambda w, d: w * d["a"] * d["n"][0] / 3),
    ],
)
def test_a01_an_output_is_a_value_a_tuple_a_list_or_any_structure(first: Any, second: Any) -> None:
    """Torch: a dict or anything nested is no output of a stage."""
    stages = two(first=first, second=second)
    prepare(stages, X)
    value = forward(stages, 0, X)
    assert torch.equal(value, X)
    backward(stages, 0, value.sum())
    assert [stage.submod.weight.grad for stage in stages] == [X.sum(), X.sum()]


def test_a02_what_a_stage_receives_says_where_it_comes_from() -> None:
    stages = two()
    prepare(stages, X)
    (root,), (received,) = stages[0].args_recv_info[0], stages[1].args_recv_info[1]
    assert root.is_root_arg
    assert root.source is None
    assert "from the caller" in repr(root)
    assert not received.is_root_arg
    assert received.source == 0
    assert "from stage 0" in repr(received)
    assert received.tensor_meta is not None
    assert received.tensor_meta.shape == (2, 3)
    assert "(2, 3)" in repr(received)
    assert "no buffer" in repr(received)  # torch keeps one for every microbatch; ours is there while it is in use


def direction_groups() -> tuple[int, list[str]]:
    rank = dist.get_rank()
    stages = [PipelineStage(nn.Linear(2, 2), rank, 2, "cpu", transport=C10dTransport(channels="per-direction"))]
    stages += [PipelineStage(nn.Linear(2, 2), rank, 2, "cpu", transport=C10dTransport(channels="per-direction"))]
    for stage in stages:
        stage.transport.open(Placement.loop(2, 2), [Wire(0, 0, 1, 0)])
    groups = [stage.transport.describe().groups for stage in stages]
    assert groups[0] == groups[1]  # made once, used by both
    for stage in stages:
        stage.transport.close()
    alone = dist.new_group([0])
    if rank == 0:
        stage = PipelineStage(nn.Linear(2, 2), 0, 2, "cpu", group=alone)
        assert stage.group is alone
        assert stage.transport.describe().groups == ()
        stage.transport.close()
    else:
        with pytest.raises(StageUsageError, match="this rank is not in the group"):
            PipelineStage(nn.Linear(2, 2), 0, 2, "cpu", group=alone)
    return len(groups[0]), [name for name, _, _ in groups[0]]


def test_a03_groups_for_the_two_directions_are_made_once(workers: WorkerPool) -> None:
    """Better: by default every ordered pair of ranks has a channel of its own; these two are what torch has."""
    for count, names in workers.run(direction_groups, 2, deadline=40):
        assert count == 2
        assert len(set(names)) == 2


def test_a04_indices_sizes_and_the_default_placement() -> None:
    for index in (-1, 2):
        with pytest.raises(StageUsageError, match=r"stage_index must be 0 to 1 for 2 stages"):
            PipelineStage(nn.Linear(2, 2), index, 2, "cpu")
    with pytest.raises(StageUsageError, match="3 ranks for 2 stages"):
        PipelineStage(nn.Linear(2, 2), 0, 2, "cpu", transport=LoopbackFabric(3).transport(0))
    stage = PipelineStage(nn.Linear(2, 2), 1, 5, "cpu", transport=LoopbackFabric(2).transport(1))
    assert stage.stage_index_to_group_rank == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
    assert (stage.group_rank, stage.group_size) == (1, 2)
    alone = PipelineStage(nn.Linear(2, 2), 1, 5, "cpu")
    assert (alone.group_rank, alone.group_size) == (1, 5)


def test_a05_flags_and_the_range_of_microbatches() -> None:
    stages = two()
    assert stages[0].has_backward is False
    stages[0].has_backward = True
    assert stages[0].has_backward is True
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, True)]
    with pytest.raises(StageUsageError, match="not prepared"):
        stages[0].forward_one_chunk(0, (X,))
    prepare(stages, X)
    first, last = stages
    for bad in (-1, 2):
        for call in (
            lambda n: first.forward_one_chunk(n, (X,)),
            first.backward_one_chunk,
            first.backward_weight_one_chunk,
            first.get_fwd_recv_ops,
            first.get_fwd_send_ops,
            first.get_bwd_recv_ops,
            last.get_bwd_send_ops,
            last.get_local_bwd_output,
            lambda n: last.set_local_fwd_input(X, n),
            lambda n: first.set_local_bwd_input((X,), n),
        ):
            with pytest.raises(StageUsageError, match=f"microbatches are 0 to 1, got {bad}"):
                call(bad)


def test_a07_values_are_handed_over_detached_and_counted() -> None:
    stages = two(
        first=lambda w, x: (w * x, torch.tensor([1, 2])),
        second=lambda w, a, b: w * a * b.sum() if a.requires_grad and not b.requires_grad else a.no_such_attribute,
    )
    first, last = stages
    prepare(stages, X)
    value = first.forward_one_chunk(0, (X,))
    with pytest.raises(StageUsageError, match="takes the caller's arguments"):
        first.set_local_fwd_input(value, 0)
    with pytest.raises(PipeliningMetadataError, match="expected 2 values from stage 0, got 1"):
        last.set_local_fwd_input(value[0], 0)
    last.set_local_fwd_input(value, 0)
    result = last.forward_one_chunk(0)
    result.sum().backward()
    assert first.submod.weight.grad is None  # detached: nothing flows past the hand-over
    assert last.submod.weight.grad is not None


def test_a08_gradients_are_handed_over_as_a_tuple() -> None:
    stages = two(first=lambda w, x: (w * x, 2 * w * x), second=lambda w, a, b: w * a)
    first, last = stages
    prepare(stages, X)
    value = forward(stages, 0, X)
    last.backward_one_chunk(0, loss=value.sum())
    with pytest.raises(StageUsageError, match="no stage before stage 0"):
        first.get_local_bwd_output(0)
    with pytest.raises(StageUsageError, match="no stage after stage 1"):
        last.set_local_bwd_input((X,), 0)
    grads = last.get_local_bwd_output(0)
    assert torch.equal(grads[0], torch.ones(2, 3))
    assert grads[1] is None
    with pytest.raises(StageUsageError, match="expected a tuple of gradients, got list"):
        first.set_local_bwd_input(list(grads), 0)
    with pytest.raises(PipeliningMetadataError, match="expected 2 gradients from stage 1"):
        first.set_local_bwd_input(grads[:1], 0)
    first.set_local_bwd_input(grads, 0)
    first.backward_one_chunk(0)
    assert first.submod.weight.grad == X.sum()  # None counted as zeros


def test_a08_without_backward_there_is_nothing_to_hand_over() -> None:
    """Torch refuses, and so cannot evaluate under a V schedule; here there are no gradients, and none are taken."""
    stages = two()
    prepare(stages, X, backward=False)
    forward(stages, 0, X)
    assert stages[1].get_local_bwd_output(0) == ()
    stages[0].set_local_bwd_input((), 0)
    with pytest.raises(StageUsageError, match="has no backward, and was given gradients"):
        stages[0].set_local_bwd_input((X,), 0)


def test_a11_a_gradient_looks_like_its_value_unless_told() -> None:
    stages = two(first=lambda w, x: (w * x, x + 1), second=lambda w, a, b: w * a + b)
    prepare(stages, X)
    metas = [info.tensor_meta for info in stages[0].grad_recv_info[0]]
    assert metas[0] is not None
    assert metas[0].shape == (2, 3)
    assert not metas[0].requires_grad
    assert metas[1] is None  # the value requires no grad, so no gradient comes
    leaf = X.clone().requires_grad_()
    told = two(
        first=lambda w, x: (w * x, 2 * w * x),
        second=lambda w, a, b: w * a,
        input_args=(X,),
        output_args=(leaf, leaf),
        output_grads=(X, X),
    )
    told[0].declared, told[1].declared = told[0].declared, told[0].declared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare([told[0], two(second=lambda w, a, b: w * a)[1]], X)
    assert [info.tensor_meta is None for info in told[0].grad_recv_info[0]] == [False, False]


def test_a12_nothing_of_a_step_is_left() -> None:
    stages = two()
    prepare(stages, X)
    value = forward(stages, 0, X)
    assert len(stages[1].output_chunks) == 1
    backward(stages, 0, value.sum())
    forward(stages, 1, X)
    for stage in stages:
        stage.clear_runtime_states()
        assert not stage.output_chunks
        assert all(info.buffer is None for infos in stage.args_recv_info.values() for info in infos)
    with pytest.raises(PipeliningMetadataError, match="no gradients of inputs"):
        stages[1].get_local_bwd_output(0)
    value = forward(stages, 0, X)
    for stage in stages:
        stage.submod.weight.grad = None
    backward(stages, 0, value.sum())
    assert stages[0].submod.weight.grad == X.sum()  # not added to what an earlier step left


def test_a13_inputs_come_first_and_require_grad_only_where_it_is_used() -> None:
    seen: list[tuple[bool, bool]] = []

    def second(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a.requires_grad, b.requires_grad))
        return w * a

    for has_backward in (True, False):
        stages = two(first=lambda w, x: (w * x, x + 1), second=second)
        prepare(stages, X, backward=has_backward)
        seen.clear()
        with pytest.raises(PipeliningMetadataError, match="the inputs are not here"):
            stages[1].forward_one_chunk(0)
        forward(stages, 0, X)
        with torch.no_grad():
            forward(stages, 1, X)
        assert seen[0] == (has_backward, False)
        assert seen[1][1] is False


def test_a14_gradients_come_first() -> None:
    stages = two()
    prepare(stages, X)
    forward(stages, 0, X)
    with pytest.raises(PipeliningMetadataError, match="the gradients of its outputs are not here"):
        stages[0].backward_one_chunk(0)


def test_a16_scaling() -> None:
    stages = two()
    stages[0].submod.weight.grad = torch.tensor(6.0)
    stages[0].scale_grads(3)
    stages[1].scale_grads(3)  # has no gradient
    assert stages[0].submod.weight.grad == 2
    stages[0].has_backward = True
    stages[0].perform_reduce_grad(2)
    assert stages[0].submod.weight.grad == 1
    stages[0].has_backward = False
    stages[0].perform_reduce_grad(2)  # better: an evaluation leaves gradients alone
    assert stages[0].submod.weight.grad == 1


def data_parallel() -> None:
    """Two replicas of a pipeline with one stage, each with half of the batch."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)

    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 4)

    whole = module()
    functional.mse_loss(whole(x), y).backward()
    mine = slice(4 * rank, 4 * rank + 4)
    reductions = []

    def counted(_, bucket):  # torch compares the annotations with its own, which strings are not
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    for kind in ("ddp", "fsdp"):
        model = module()
        if kind == "ddp":
            model = DistributedDataParallel(model)
            model.register_comm_hook(None, counted)
        else:
            fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]))
        stage = PipelineStage(model, 0, 1, "cpu", transport=LoopbackFabric(1).transport(0))
        schedule = pipelining.ScheduleGPipe(stage, 4, functional.mse_loss)
        for _ in range(2):
            model.zero_grad()
            schedule.step(x[mine], target=y[mine])
            for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                torch.testing.assert_close(grad, expected.grad)
    assert len(reductions) == 2  # one in each step, not one for each microbatch


def test_a15_data_parallel_modules_reduce_once_a_step(workers: WorkerPool) -> None:
    workers.run(data_parallel, 2, deadline=60)


def start(ops: Sequence[dist.P2POp]) -> list[dist.Work]:
    """As torch's schedules do it."""
    return dist.batch_isend_irecv(list(ops)) if ops else []


def wait(ops: Sequence[dist.P2POp]) -> None:
    for work in start(ops):
        work.wait()


def between_ranks() -> None:
    """A06, A09, A10, A13, A14, A21 on ranks 1 and 3 of four, which are the pipeline's ranks 0 and 1."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=True)
    index = dist.get_group_rank(group, dist.get_rank())
    leaf = X.clone().requires_grad_()
    spread = DTensor.from_local(leaf.detach(), mesh, [Replicate()]).requires_grad_()
    seen: list[torch.Tensor] = []

    def first(w: torch.Tensor, x: torch.Tensor) -> Any:
        whole = DTensor.from_local(w * x, mesh, [Replicate()])
        return {"plain": w * x, "spread": whole, "static": "text", "no grad": x + 1, "unused": 2 * w * x}

    def second(w: torch.Tensor, d: dict[str, Any]) -> torch.Tensor:
        seen.extend(d[name] for name in ("plain", "spread", "no grad"))
        assert d["static"] == "text"
        return w * d["plain"] + d["spread"].to_local() + d["no grad"]

    stage = PipelineStage(Calls((first, second)[index]), index, 2, "cpu", group=group, get_mesh=lambda key: mesh)
    assert stage.group is group
    assert stage.group_rank == index
    assert stage.group_size == 2
    for work in dist.batch_isend_irecv(ops := stage._get_init_p2p_neighbors_ops()):
        work.wait()
    received = [op.tensor for op in ops if "irecv" in repr(op)]
    assert len(received) == 1
    assert received[0].item() == 1 - index
    prepare([stage], X, loss_fn=lambda output, _: output.sum(), target=torch.zeros(()))
    peer = 3 if index == 0 else 1

    assert (stage.get_bwd_recv_ops(0) if index else stage.get_fwd_recv_ops(0)) == []  # A06
    if index == 0:
        stage.forward_one_chunk(0, (X,))
        sends = stage.get_fwd_send_ops(0)
        assert [type(op.tensor) for op in sends] == [
            torch.Tensor
        ] * 4  # A09: local parts; static values need no message
        assert all(not op.tensor.requires_grad and op.peer == peer and op.group is group for op in sends)
        assert stage.get_bwd_send_ops(0) == []
        work = start(sends)
        receives = stage.get_bwd_recv_ops(0)
        # A06: on a channel of its own direction; here, under tags that differ
        assert not {op.tag for op in receives} & {op.tag for op in sends}
        assert len(receives) == 3  # none for what requires no grad
        infos = stage.grad_recv_info[0]
        assert sum(info.buffer is not None for info in infos) == 3
        work += start(receives)
        for one in work:
            one.wait()
        stage.backward_one_chunk(0)
        assert stage.submod.weight.grad == 2 * X.sum()  # of "unused" a zero came
    else:
        receives = stage.get_fwd_recv_ops(0)
        assert len(receives) == 4
        assert all(info.buffer is not None for info in stage.args_recv_info[0])
        wait(receives)
        seen.clear()
        result = stage.forward_one_chunk(0)
        assert isinstance(seen[1], DTensor)
        assert seen[1].placements == (Replicate(),)
        assert seen[1].device_mesh == mesh
        assert [value.requires_grad for value in seen] == [True, True, False]
        assert torch.equal(result, 3 * X + 1)
        stage.backward_one_chunk(0, loss=result.sum())
        found = stage._torch.run.input_grads[0]
        assert [grad is None for grad in found] == [False, False, True, True]
        sends = stage.get_bwd_send_ops(0)
        assert [op.peer for op in sends] == [
            peer
        ] * 3  # A10: in order; zeros for what has no gradient, nothing for what needs none
        assert torch.equal(sends[2].tensor, torch.zeros(2, 3))
        wait(sends)
    dist.barrier(group)
    if index:  # an error ends the transport on every rank
        with pytest.raises(PipeliningMetadataError, match="no gradients of inputs"):
            stage.get_bwd_send_ops(0)
    del spread
    stage.transport.close()


def test_a06_a09_a10_a13_a14_a21_between_ranks(workers: WorkerPool) -> None:
    workers.run(between_ranks, 4, deadline=60)


def unexpected_gradient() -> None:
    """The gradient of a value was declared not to be, and is there."""
    rank = dist.get_rank()
    leaf = X.clone().requires_grad_()
    transport = C10dTransport()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing flows back is what is wanted here
        options = {"input_args": X, "output_args": leaf, "output_grads": (None,)} if rank == 0 else {}
        options = options or {"input_args": leaf, "output_args": leaf, "input_grads": (None,)}
        stage = PipelineStage(Calls(scaled), rank, 2, "cpu", transport=transport, **options)
    prepare([stage], X)
    assert stage._torch.verdict.item() == 1
    if rank == 0:
        stage.forward_one_chunk(0, (X,))
        wait(stage.get_fwd_send_ops(0))
        assert stage.get_bwd_recv_ops(0) == []
    else:
        wait(stage.get_fwd_recv_ops(0))
        stage.backward_one_chunk(0, loss=stage.forward_one_chunk(0).sum())
        with pytest.raises(PipeliningMetadataError, match="value 0 from stage 0 has a gradient, but input_grads said"):
            stage.get_bwd_send_ops(0)
    transport.close()


def test_a10_a_gradient_that_nobody_waits_for_is_refused(workers: WorkerPool) -> None:
    workers.run(unexpected_gradient, 2, deadline=40)
