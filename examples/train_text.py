"""Trains a small GPT, or any causal model of transformers, on text through a pipeline, and checks it against one process.

    python examples/train_text.py                          # ranks are threads of this process
    python examples/train_text.py --launcher gloo          # ranks are processes, started by torchrun
    python examples/train_text.py --launcher shm           # the same over the example's own transport, transport_shm
    torchrun --nproc-per-node 4 examples/train_text.py     # the same
    python examples/train_text.py --model transformers:gpt2   # a model as its authors wrote it, cut by stepwell_stage.split

The text is the help that ships inside every CPython, or any file given with --text; tokens are bytes.
"""

from __future__ import annotations

import argparse
import copy
import os
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional

import stepwell
from stepwell_stage import Costs, ModelSplit, Plan, Schedule, Timeline, schedules, simulate, split
from stepwell_stage.exceptions import StageError

VOCABULARY = 256  # bytes
OWN, FROM_TRANSFORMERS = "gpt", "transformers:"


class Embedding(nn.Module):
    """Bytes and their positions to vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm_2(x))


class Head(nn.Module):
    """Vectors to the next byte's scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.norm(x))


def scores_of(output: Any) -> Tensor:
    """The scores that a model returns, bare or among other things."""
    return output if isinstance(output, Tensor) else output["logits"]


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores_of(output).flatten(0, 1), target.flatten())


class Unavailable(Exception):
    """What was asked for is not here; the message says what to do."""


def build(options: argparse.Namespace) -> nn.Module:
    """The whole model; every rank that builds it gets the same weights."""
    torch.manual_seed(options.seed)
    if options.model != OWN:
        return build_from_transformers(options)
    blocks = [Block(options.width, options.heads) for _ in range(options.layers)]
    return nn.Sequential(Embedding(options.width, options.seq_len), *blocks, Head(options.width))


def build_from_transformers(options: argparse.Namespace) -> nn.Module:
    """A causal model by its class or its kind, small and with random weights; nothing is downloaded."""
    name = options.model.removeprefix(FROM_TRANSFORMERS)
    try:
        import transformers
    except ImportError as error:
        raise Unavailable("transformers is not installed: python -m pip install transformers") from error
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name, None)
    try:
        config_class = kind.config_class if kind else type(transformers.AutoConfig.for_model(name))
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except (AttributeError, KeyError, ValueError) as error:
        raise Unavailable(
            f"transformers {transformers.__version__} has no causal model {name!r}: give a kind, such as gpt2 or llama, or a"
            " class, such as LlamaForCausalLM"
        ) from error
    if kind not in (None, causal):
        raise Unavailable(f"{name} does not predict the next token: use --model {FROM_TRANSFORMERS}{causal.__name__}")
    default = config_class()
    sizes = {  # under the names that configurations share; each maps them to its own
        "vocab_size": VOCABULARY,
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "head_dim": options.width // options.heads,
        "intermediate_size": 4 * options.width,
        "ffn_dim": 4 * options.width,
        "word_embed_proj_dim": options.width,
        "max_position_embeddings": options.seq_len,
    }
    known = {key: value for key, value in sizes.items() if hasattr(default, key)}
    # Where ranks are threads they share one generator, and no check against one process could hold.
    no_dropout = {key: 0.0 for key, value in default.to_dict().items() if "drop" in key and isinstance(value, float)}
    config = config_class(**known, **no_dropout, use_cache=False)
    try:
        return causal(config)
    except ValueError as error:
        raise Unavailable(f"transformers cannot build {name!r}: {str(error).splitlines()[0]}") from error


def cut_for(model: nn.Module, schedule: Schedule, options: argparse.Namespace) -> ModelSplit | None:
    """A model that is no row of layers, cut into the schedule's stages."""
    if isinstance(model, nn.Sequential):
        return None
    # As large as a microbatch: some models go another way where there is one sample only.
    size = -(-options.batch // options.microbatches)
    example = torch.zeros(size, options.seq_len, dtype=torch.long, device=options.device)
    return split(model, schedule.placement.num_stages, example=example)


def batches(text: bytes, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Random pieces of the text, and the same one byte later; the same on every rank."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        starts = torch.randint(len(data) - options.seq_len, (options.batch, 1), generator=generator)
        places = starts + torch.arange(options.seq_len)
        yield data[places].to(options.device), data[places + 1].to(options.device)


def optimizer_for(parameters: Iterator[nn.Parameter], options: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=options.lr)


class Check:
    """The same steps in one process, and how far the pipeline is from them. Lives on the last rank."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        self.model = copy.deepcopy(model).to(options.device)
        self.optimizer = optimizer_for(self.model.parameters(), options)
        self.microbatches = options.microbatches
        self.steps = 0
        self.loss_difference = self.gradient_difference = self.gradient_size = 0.0

    def step(self, tokens: Tensor, target: Tensor, loss: float, gradients: dict[str, Tensor]) -> None:
        """One step of plain PyTorch over the same microbatches, compared with what the pipeline got."""
        self.steps += 1
        self.optimizer.zero_grad()
        total = 0.0
        parts = zip(tokens.tensor_split(self.microbatches), target.tensor_split(self.microbatches), strict=True)
        for part, part_target in parts:
            share = len(part) / len(tokens)
            part_loss = loss_fn(self.model(part), part_target)
            (part_loss * share).backward()
            total += share * part_loss.item()
        self.loss_difference = max(self.loss_difference, abs(total - loss))
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            difference = (parameter.grad - gradients[name]).abs().max().item()
            self.gradient_difference = max(self.gradient_difference, difference)
            self.gradient_size = max(self.gradient_size, parameter.grad.abs().max().item())
        self.optimizer.step()

    def report(self) -> tuple[bool, str]:
        """Whether the differences are rounding, and a sentence.

        The pipeline adds in the order of the loop above, so on one kind of device the expected difference is zero. Where a
        library picks another kernel for it, a step may round its gradients by some units in the last place, and the
        differences of the steps add up.
        """
        allowed = 64 * torch.finfo(torch.float32).eps * self.steps
        right = self.loss_difference <= allowed and self.gradient_difference <= allowed * self.gradient_size
        sentence = (
            f"check against one process over {self.steps} steps: largest difference in loss {self.loss_difference:.3g},"
            f" in gradients {self.gradient_difference:.3g} (largest gradient {self.gradient_size:.3g}):"
            f" {'ok' if right else f'BEYOND ROUNDING, at most {allowed:.3g} (relative) was expected'}"
        )
        return right, sentence


def train(
    world: stepwell.World, model: nn.Module, cut: ModelSplit | None, text: bytes, options: argparse.Namespace
) -> bool:
    """What every rank does. Returns whether the check, if asked for, went well."""
    schedule = schedule_for(options)
    last = schedule.placement.ranks[-1]
    speaks = world.rank == last
    check = Check(model, options) if options.check and speaks else None
    whole = copy.deepcopy(model) if speaks else None
    pipe = stepwell.pipeline(cut or model, world, loss_fn=loss_fn, schedule=schedule, trace=True)
    optimizer = optimizer_for(pipe.parameters(), options)
    console = Console(quiet=not speaks, highlight=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    what = type(model).__name__ if cut else "GPT"
    workers = "threads" if options.launcher == "loopback" else "processes"
    console.print(
        f"{what} of {parameters / 1e6:.2f} M parameters, {options.layers} layers in {schedule.placement.num_stages} stages on"
        f" {world.size} {workers} ({options.device}), {schedule.name}, {options.microbatches} microbatches;"
        f" {len(text) / 1e3:.0f} kB of text"
    )
    with Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
        disable=not console.is_terminal or not speaks,
    ) as progress:
        bar = progress.add_task("", total=options.steps, figures="")
        first = loss = float("nan")
        spent = 0.0
        for step, (tokens, target) in enumerate(batches(text, options), 1):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = pipe.step(tokens, target=target).loss or 0.0
            spent += time.perf_counter() - start
            if options.check:
                gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
                gathered = stepwell.gather(world.transport, gradients, to=last)
                if check is not None and gathered is not None:
                    check.step(tokens, target, loss, {k: v for part in gathered for k, v in part.items()})
                for rank in range(world.size):  # the check has kept one rank busy: begin the next step together
                    stepwell.gather(world.transport, {}, to=rank)
            optimizer.step()
            first = loss if step == 1 else first
            timeline = pipe.timeline()
            if timeline is not None:
                speed = step * tokens.numel() / spent
                figures = f"loss {loss:.3f}  {speed:,.0f} tokens/s  bubble {timeline.bubble:.0%}"
                progress.update(bar, advance=1, figures=figures)
                if not console.is_terminal and (step % max(1, options.steps // 10) == 0 or step == 1):
                    console.print(f"step {step:4d}/{options.steps}  {figures}")
    weights = stepwell.gather(world.transport, dict(pipe.named_parameters()), to=last)
    if whole is None or weights is None or timeline is None:
        return True
    own = dict(whole.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in (pair for part in weights for pair in part.items()):
            own[name].copy_(value)
    predicted = predict(pipe.executor.plan, timeline)
    for what, picture in (("last step, as measured", timeline), ("as predicted from its actions", predicted)):
        console.print(f"\n{what}:\n{picture.to_text(min(console.width, 120))}", markup=False)
    console.print(f"\nsample:\n{sample(whole.to(options.device), options)}\n", markup=False)
    console.print(f"loss {first:.3f} in the first step, {loss:.3f} in the last")
    if check is None:
        return True
    right, sentence = check.report()
    console.print(sentence)
    return right


def predict(plan: Plan, measured: Timeline) -> Timeline:
    """The step that the schedule makes of actions as long as they were on average, if nothing else took time."""
    return simulate(plan, Costs.measured(measured, plan.placement.num_stages)).timeline


@torch.no_grad()
def sample(model: nn.Module, options: argparse.Namespace, length: int = 160) -> str:
    """Text drawn from the model, byte by byte."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    tokens = torch.tensor([list(b"The ")], device=options.device)
    for _ in range(length):
        scores = scores_of(model(tokens[:, -options.seq_len :]))[:, -1] / 0.7
        drawn = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # no control codes to the terminal


def schedule_for(options: argparse.Namespace) -> Schedule:
    return schedules.BY_NAME[options.schedule](options.stages, options.microbatches)


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, bytes]:
    """Options and text; whatever does not fit together ends here, with a sentence and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        default=OWN,
        help=f"{OWN}, this file's own (default), or transformers:NAME, such as gpt2, llama or LlamaForCausalLM",
    )
    parser.add_argument(
        "--stages",
        type=int,
        default=4,
        help="ranks; most schedules have one stage a rank, some two (default 4)",
    )
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(schedules.BY_NAME)} (default 1f1b)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches a batch is cut into (default 8)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch (default 16)")
    parser.add_argument("--seq-len", type=int, default=64, help="bytes in a sequence (default 64)")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks (default 6)")
    parser.add_argument("--width", type=int, default=128, help="width of the model (default 128)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default 4)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample (default 0)")
    parser.add_argument("--device", default="cpu", help="device type (default cpu)")
    parser.add_argument(
        "--launcher", choices=["loopback", "gloo", "shm"], default="loopback", help="threads, or processes"
    )
    parser.add_argument("--text", type=Path, help="a file to train on, instead of Python's own help")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the same steps in one process and compare",
    )
    options = parser.parse_args(arguments)
    for name in ("stages", "microbatches", "steps", "batch", "seq_len", "layers", "width", "heads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not 0 <= options.lr < float("inf"):
        parser.error(f"--lr must be a number, at least 0 and finite, got {options.lr}")
    if options.model != OWN and not options.model.startswith(FROM_TRANSFORMERS):
        parser.error(f"--model must be {OWN} or {FROM_TRANSFORMERS}NAME, got {options.model!r}")
    if options.schedule not in schedules.BY_NAME:
        parser.error(f"--schedule must be one of {', '.join(schedules.BY_NAME)}, got {options.schedule!r}")
    try:
        stages = schedule_for(options).placement.num_stages
    except StageError as error:
        parser.error(f"--schedule {options.schedule} with --stages {options.stages}: {error}")
    if options.model == OWN and stages > options.layers + 2:
        parser.error(
            f"--stages {options.stages} with --schedule {options.schedule} needs {stages} pieces, but {options.layers} layers,"
            f" embedding and head make {options.layers + 2}: use fewer stages or more --layers"
        )
    if options.batch < options.microbatches:
        parser.error(
            f"--batch {options.batch} cannot be cut into {options.microbatches} microbatches: use a larger batch"
        )
    if options.width % options.heads:
        parser.error(f"--width {options.width} must be a multiple of --heads {options.heads}")
    if options.device != "cpu":
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if current is None or options.device != current.type:
            parser.error(
                f"--device {options.device} is not here; this machine has cpu{f' and {current.type}' if current else ''}"
            )
    if options.text is None:
        text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
    else:
        try:
            text = options.text.read_bytes()
        except OSError as error:
            parser.error(f"--text {options.text} cannot be read: {error.strerror}")
    if len(text) <= options.seq_len + 1:
        parser.error(f"the text has {len(text)} bytes, too few for --seq-len {options.seq_len}")
    started = os.environ.get("WORLD_SIZE")
    if started is not None and int(started) != options.stages:
        parser.error(f"torchrun started {started} ranks, but --stages is {options.stages}: make them equal")
    if started is not None and options.launcher == "loopback":
        options.launcher = "gloo"
    if options.launcher == "shm" and options.device != "cpu":
        parser.error(f"--launcher shm carries tensors in host memory: use --device cpu, not {options.device}")
    return options, text


def train_over_shm(model: nn.Module, cut: ModelSplit | None, text: bytes, options: argparse.Namespace) -> bool:
    """Trains over a transport that no layer of stepwell knows of."""
    sys.path.insert(0, str(Path(__file__).with_name("transport_shm") / "src"))  # runs without installing the example
    from stepwell_transport_shm import SharedMemoryTransport

    transport = SharedMemoryTransport.from_environment()
    try:
        world = stepwell.World(transport.rank, transport.size, torch.device(options.device), transport)
        return train(world, model, cut, text, options)
    except BaseException as error:
        transport.abort(f"{type(error).__name__}: {error}")  # this process may live on, and the others must not wait
        raise
    finally:
        transport.close()


def main() -> None:
    options, text = parse()
    if options.launcher != "loopback" and "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // options.stages)))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.stages)]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *command, __file__, *sys.argv[1:]])
    try:
        model = build(options)
        cut = cut_for(model, schedule_for(options), options)
    except (Unavailable, StageError) as error:
        print(f"train_text.py: error: --model {options.model}: {error}", file=sys.stderr)
        sys.exit(2)
    if options.launcher == "shm":
        sys.exit(0 if train_over_shm(model, cut, text, options) else 1)
    results = stepwell.launch(
        lambda world: train(world, model, cut, text, options), ranks=options.stages, device=options.device
    )
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
