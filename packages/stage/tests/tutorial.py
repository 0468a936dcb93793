"""Train a small transformer in a pipeline: a script in the form in which such scripts are written for torch.

test_torch_schedules.py runs it as it stands, and once more with every import of torch.distributed.pipelining changed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleLoopedBFS
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn import functional

VOCABULARY, DIM, HEADS, LAYERS = 32, 16, 2, 4
BATCH, LENGTH, MICROBATCHES = 8, 6, 4
IN_V = ("ZBVZeroBubble", "DualPipeV")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """A stage has some of the layers; what it does not have is None."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens, positions=None):
        x = self.embedding(tokens) if self.embedding is not None else tokens
        if positions is not None:
            x = x + positions
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def cut(stage_index, num_stages):
    torch.manual_seed(0)
    model = Transformer()
    first, last = stage_index * LAYERS // num_stages, (stage_index + 1) * LAYERS // num_stages
    for number in range(LAYERS):
        if not first <= number < last:
            del model.layers[str(number)]
    if stage_index > 0:
        model.embedding = None
    if stage_index < num_stages - 1:
        model.head = None
    return model


def loss_fn(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build(schedule_name, rank, world_size, device, loss_fn, *options, **named):
    """The schedule over this rank's stages, their modules, their indices, and the number of all."""
    schedule_class = get_schedule_class(schedule_name)
    looped = not issubclass(schedule_class, PipelineScheduleSingle)
    num_stages = 2 * world_size if looped else world_size
    indices = [rank]
    if looped:
        indices.append(num_stages - 1 - rank if schedule_name in IN_V else rank + world_size)
    modules = [cut(index, num_stages).to(device) for index in indices]
    stages = [PipelineStage(m, i, num_stages, torch.device(device)) for m, i in zip(modules, indices, strict=True)]
    given = stages if looped else stages[0]
    return schedule_class(given, MICROBATCHES, loss_fn, *options, **named), modules, indices, num_stages


def train(schedule_name, rank, world_size, device="cpu"):
    """Losses of two steps, and the gradients of the second."""
    schedule, modules, indices, num_stages = build(schedule_name, rank, world_size, device, loss_fn)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)

    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH))
    losses, history = [], []
    for _ in range(2):
        optimizer.zero_grad()
        inputs = (tokens,) if 0 in indices else ()
        if num_stages - 1 in indices:
            output = schedule.step(*inputs, target=targets, losses=losses)
            assert output.shape == (BATCH, LENGTH, VOCABULARY)
            history += [loss.item() for loss in losses]
        else:
            schedule.step(*inputs)
        optimizer.step()
    return history, {index: [p.grad for p in m.parameters()] for index, m in zip(indices, modules, strict=True)}


def summed(output, target, *, scale):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") * scale


def with_all_arguments(schedule_name, rank, world_size, device="cpu"):
    """Every argument that torch's classes and methods have: outputs, losses and gradients."""
    looped = not issubclass(get_schedule_class(schedule_name), PipelineScheduleSingle)
    batch = TensorChunkSpec(0)
    specs = () if get_schedule_class(schedule_name) is ScheduleLoopedBFS else ((batch,), {"positions": batch})
    # With receives deferred, values and gradients change places in torch's split backwards: two ranks are each other's next.
    split = schedule_name in ("InterleavedZeroBubble", "ZBVZeroBubble")
    named = {"backward_requires_autograd": True, "defer_pp_recv": not split} if looped else {}
    schedule, modules, indices, num_stages = build(
        schedule_name, rank, world_size, device, summed, *specs, output_merge_spec=batch, scale_grads=False, **named
    )
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH))
    inputs, kept = ((tokens,), {"positions": torch.randn(BATCH, LENGTH, DIM)}) if 0 in indices else ((), {})
    last = {"target": targets, "losses": [torch.zeros(())]} if num_stages - 1 in indices else {}
    calls = [(schedule.step, {"return_outputs": True}), (schedule.step, {"return_outputs": False})]
    if schedule_name not in IN_V:  # on which torch's evaluations fail
        calls += [(schedule.eval, {}), (schedule.eval, {"return_outputs": False})]
    found = []
    for call, options in calls:
        output = call(*inputs, **kept, **last, loss_kwargs={"scale": 0.25}, **options)
        found.append((output, [loss.detach() for loss in last.get("losses", ())]))
    return found, {index: [p.grad for p in m.parameters()] for index, m in zip(indices, modules, strict=True)}


def main():
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert get_schedule_class("gpipe") is ScheduleGPipe
    history, _ = train("GPipe", rank, world_size)
    if history:
        print(f"losses: {history}")  # noqa: T201 - a script of its own
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
