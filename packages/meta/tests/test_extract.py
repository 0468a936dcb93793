"""extract_meta(s), derive_grad_metas, to_local_if_dtensor: between tensors, their metas and what crosses a wire."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stepwell_meta import (
    DTensorMeta,
    MeshKey,
    TensorMeta,
    UnsupportedValueError,
    derive_grad_metas,
    extract_meta,
    extract_metas,
    to_local_if_dtensor,
    validate_static_arg_grad_correspondence,
)
from stepwell_meta._compat import AsyncCollectiveTensor
from stepwell_meta.testing import WorkerPool

PLAIN = TensorMeta((2, 3), (3, 1), torch.float32)


def test_the_metas_of_tensors() -> None:
    assert extract_meta(torch.zeros(2, 3)) == PLAIN
    assert extract_metas([torch.zeros(2, 3), torch.zeros(2, 3)]) == (PLAIN, PLAIN)
    assert extract_metas((torch.zeros(2, 3), None), allow_none=True) == (PLAIN, None)
    assert extract_metas(()) == ()
    assert extract_metas([PLAIN, torch.zeros(2, 3)]) == (PLAIN, PLAIN)


def test_what_has_no_meta_is_named_with_its_place() -> None:
    with pytest.raises(UnsupportedValueError, match=r"^stage 2: output 1: expected a tensor, got NoneType$") as caught:
        extract_metas([torch.zeros(1), None], what="stage 2: output")  # type: ignore[list-item]
    assert (caught.value.path, caught.value.type_name) == ("stage 2: output 1", "NoneType")
    with pytest.raises(UnsupportedValueError, match=r"^value 0: .*sparse_coo"):
        extract_metas([torch.eye(2).to_sparse()])


def test_gradients_look_like_plain_values_and_are_unknown_for_dtensors() -> None:
    needs = TensorMeta((2, 3), (1, 2), torch.bfloat16, True)
    sharded = DTensorMeta((2,), (1,), torch.float32, True, (4,), (1,), (Shard(0),), MeshKey(("tp",), (2,), (1,)))
    assert derive_grad_metas((needs, PLAIN, sharded)) == (TensorMeta((2, 3), (1, 2), torch.bfloat16, False), None, None)
    assert derive_grad_metas(()) == ()


def test_a_plain_tensor_stays_as_it_is() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert to_local_if_dtensor(tensor) is tensor
    detached = to_local_if_dtensor(tensor, detach=True)
    assert not detached.requires_grad
    assert detached.data_ptr() == tensor.data_ptr()


def test_a_conjugation_or_negation_that_torch_put_off_is_done_before_sending() -> None:
    source = torch.tensor([1 + 2j, 3 - 1j])
    for lazy in (source.conj(), source.conj().imag, source.mH.T if source.ndim == 2 else source.conj()):
        assert lazy.is_conj() or lazy.is_neg()
        sent = to_local_if_dtensor(lazy, detach=True)
        assert not sent.is_conj()
        assert not sent.is_neg()
        assert torch.equal(sent, lazy)


def local_parts() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    weight = distribute_tensor(torch.arange(8.0), mesh, (Shard(0),)).requires_grad_()
    local = to_local_if_dtensor(weight)
    assert local.requires_grad
    local.sum().backward()
    assert weight.grad is not None
    sent = to_local_if_dtensor(weight, detach=True)
    assert type(sent) is torch.Tensor
    assert not sent.requires_grad
    assert torch.equal(sent, torch.arange(8.0).chunk(dist.get_world_size())[dist.get_rank()])
    assert isinstance(extract_meta(weight), DTensorMeta)


def test_the_local_part_of_a_dtensor(workers: WorkerPool) -> None:
    workers.run(local_parts, 2)


def results_in_flight() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    size = dist.get_world_size()
    started = funcol.all_reduce(torch.ones(3), "sum", mesh)
    assert isinstance(started, AsyncCollectiveTensor)
    assert extract_meta(started) == TensorMeta((3,), (1,), torch.float32)
    sent = to_local_if_dtensor(started, detach=True)
    assert type(sent) is torch.Tensor
    assert sent.tolist() == [size] * 3

    partial = DTensor.from_local(funcol.all_reduce(torch.ones(3), "sum", mesh), mesh, (Replicate(),), run_check=False)
    assert extract_meta(partial).shape == (3,)
    assert type(to_local_if_dtensor(partial, detach=True)) is torch.Tensor


def test_the_result_of_a_collective_in_flight_is_plain_and_waited_for(workers: WorkerPool) -> None:
    workers.run(results_in_flight, 2)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8, bias=False)
        self.down = torch.nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def tensor_parallel_stage() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain = MLP()
    x = torch.randn(2, 4)
    expected = plain(x)
    parallel = parallelize_module(plain, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    output = parallel(x)
    assert isinstance(output, AsyncCollectiveTensor)  # the reason why these count as plain
    assert extract_meta(output) == TensorMeta((2, 4), (4, 1), torch.float32, True)
    sent = to_local_if_dtensor(output, detach=True)
    assert type(sent) is torch.Tensor
    torch.testing.assert_close(sent, expected.detach())


def test_the_output_of_a_tensor_parallel_module_is_plain(workers: WorkerPool) -> None:
    workers.run(tensor_parallel_stage, 2)


def correspondence() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = distribute_tensor(torch.zeros(4, 2), mesh, (Replicate(),)).requires_grad_()
    grad = distribute_tensor(torch.zeros(4, 2), mesh, (Shard(0),))  # other placements are fine
    validate_static_arg_grad_correspondence([value], [grad], stage=0, kind="input")
    try:
        validate_static_arg_grad_correspondence([value], [torch.zeros(4, 2)], stage=0, kind="input")
    except Exception as error:
        return str(error)
    return "accepted"


def test_gradients_of_real_dtensors(workers: WorkerPool) -> None:
    for words in workers.run(correspondence, 2):
        assert words.startswith(
            "stage 0: input gradient 0: type mismatch: expected a DTensor or None, got torch.float32"
        )
