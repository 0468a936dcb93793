"""Train a small transformer in a pipeline: a script in the form in which such scripts are written for torch.

test_torch_schedules.py runs it as it stands, and once more with every import of torch.distributed.pipelining changed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn import functional

VOCABULARY, DIM, HEADS, LAYERS = 32, 16, 2, 4
BATCH, LENGTH, MICROBATCHES = 8, 6, 4


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

    def forward(self, tokens):
        x = self.embedding(tokens) if self.embedding is not None else tokens
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


def train(schedule_name, rank, world_size, device="cpu"):
    """Losses of two steps, and the gradients of the second."""
    schedule_class = get_schedule_class(schedule_name)
    looped = not issubclass(schedule_class, PipelineScheduleSingle)
    num_stages = 2 * world_size if looped else world_size
    indices = [rank]
    if looped:
        in_v = schedule_name in ("ZBVZeroBubble", "DualPipeV")
        indices.append(num_stages - 1 - rank if in_v else rank + world_size)
    modules = [cut(index, num_stages).to(device) for index in indices]
    stages = [PipelineStage(m, i, num_stages, torch.device(device)) for m, i in zip(modules, indices, strict=True)]
    schedule = schedule_class(stages if looped else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_fn)
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
