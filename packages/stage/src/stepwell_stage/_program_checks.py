"""What any stage program must do, each promise tried on a program made for the purpose, beside a module that autograd runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from stepwell_meta import normalize_outputs

from .exceptions import StageUsageError
from .plan._action import Kind
from .run._program import StageProgram


class ProgramCheckError(AssertionError):
    """A program does not do what :class:`stepwell_stage.StageProgram` promises."""


@attrs.frozen
class ProgramCheck:
    """One promise.

    Attributes:
        name: for test reports.
        run: tries it on a program made for the purpose.
        is_frozen: whether the module's parameters require no grad.
    """

    name: str
    run: Callable[[ProgramSubject], None]
    is_frozen: bool = False


PROGRAM_CHECKS: list[ProgramCheck] = []
"""The whole battery, for those who want one test for each check."""


def check_stage_program(
    make_program: Callable[[nn.Module], StageProgram],
    *,
    module: nn.Module | None = None,
    microbatches: Sequence[Sequence[torch.Tensor]] | None = None,
    checks: Iterable[ProgramCheck] | None = None,
) -> None:
    """Try every promise of :class:`stepwell_stage.StageProgram` on a program of yours.

    What it computes is compared with a module that autograd runs. A program that runs any module is given a small one; for
    one that computes a certain thing, pass the module that computes the same, and microbatches that it takes.

    Example::

        check_stage_program(EagerProgram)

    Args:
        make_program: from a module to a program that computes what the module does and accumulates into the gradients of its
            parameters. Called once for each check, with a copy.
        module: what to compute; any outputs, of which one at least requires grad. Deterministic.
        microbatches: its positional arguments for three microbatches or more; those that require grad are values that come from
            a stage before with a gradient to go back.
        checks: which promises; all of ``PROGRAM_CHECKS`` by default.

    Raises:
        ProgramCheckError: the first promise that is not kept.
    """
    if (module is None) != (microbatches is None):
        raise StageUsageError("give a module and microbatches that it takes, or neither")
    given = _Sample() if module is None else module
    parts = _sample_microbatches() if microbatches is None else microbatches
    if len(parts) < 3:
        raise StageUsageError(f"the checks need 3 microbatches or more, got {len(parts)}")
    for check in PROGRAM_CHECKS if checks is None else checks:
        mine, reference = copy.deepcopy(given), copy.deepcopy(given)
        if check.is_frozen:
            for part in (mine, reference):
                part.requires_grad_(False)
        try:
            check.run(ProgramSubject(make_program(mine), mine, reference, parts))
        except Exception as error:
            raise ProgramCheckError(f"check {check.name!r} failed: {error}") from error


class ProgramSubject:
    """A program under test, beside the module that says what is right. Mutable: gradients accumulate in both.

    Attributes:
        program: the program.
        reference: the module that says what is right.
        count: how many different microbatches there are.
    """

    def __init__(
        self, program: StageProgram, mine: nn.Module, reference: nn.Module, parts: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        self.program = program
        self.count = len(parts)
        self.reference = reference
        self._mine = mine
        self._parts = parts

    def received(self, number: int) -> list[torch.Tensor]:
        """Fresh leaves with the values of a microbatch."""
        return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self._parts[number]]

    def forward(self, number: int, received: Sequence[torch.Tensor] | None = None) -> Any:
        """Let the program run a microbatch forward."""
        received = self.received(number) if received is None else received
        return self.program.forward(number, received, lambda tensors: (tuple(tensors), {}))

    def backward(self, number: int, kind: Kind, outputs: Any) -> tuple[torch.Tensor | None, ...]:
        """Let the program run a backward, from gradients that depend on the microbatch."""
        roots = [leaf for leaf in normalize_outputs(outputs).leaves if leaf.requires_grad]
        return self.program.backward(number, kind, roots, [_grad_of(root, number) for root in roots])

    def expect_outputs(self, outputs: Any, number: int) -> None:
        """The program's outputs are the module's."""
        found, right = normalize_outputs(outputs), normalize_outputs(self.reference(*self.received(number)))
        _expect(found.structure == right.structure, f"expected outputs {right.structure}, got {found.structure}")
        for position, (mine, other) in enumerate(zip(found.leaves, right.leaves, strict=True)):
            _close(mine, other, f"output {position}")
            _expect(
                mine.requires_grad == other.requires_grad,
                f"output {position}: expected requires_grad={other.requires_grad}, got {mine.requires_grad}",
            )

    def expect_input_grads(self, grads: Sequence[torch.Tensor | None], number: int) -> None:
        """These are the gradients of a microbatch's received tensors; the reference's parameters get theirs."""
        received = self.received(number)
        self.run_reference(received, number)
        _expect(len(grads) == len(received), f"expected {len(received)} gradients of inputs, got {len(grads)}")
        for position, (mine, tensor) in enumerate(zip(grads, received, strict=True)):
            _same_grad(mine, tensor.grad, f"the gradient of input {position}")

    def run_reference(self, inputs: Sequence[torch.Tensor], number: int) -> None:
        """Forward and backward of the reference."""
        roots = [leaf for leaf in normalize_outputs(self.reference(*inputs)).leaves if leaf.requires_grad]
        torch.autograd.backward(roots, [_grad_of(root, number) for root in roots])

    def expect_parameter_grads(self) -> None:
        """The parameters' gradients are the reference's."""
        for (name, mine), other in zip(self._mine.named_parameters(), self.reference.parameters(), strict=True):
            _same_grad(mine.grad, other.grad, f"the gradient of parameter {name!r}")

    def forget(self) -> None:
        """Take away every gradient."""
        self._mine.zero_grad()
        self.reference.zero_grad()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What stands around the microbatches of a step, as in a plan."""
        self.program.unshard()
        yield
        self.program.reduce_grads()
        self.program.reshard()


def _check(
    *, is_frozen: bool = False
) -> Callable[[Callable[[ProgramSubject], None]], Callable[[ProgramSubject], None]]:
    def register(run: Callable[[ProgramSubject], None]) -> Callable[[ProgramSubject], None]:
        PROGRAM_CHECKS.append(ProgramCheck(run.__name__, run, is_frozen))
        return run

    return register


@_check()
def forward_is_the_modules(subject: ProgramSubject) -> None:
    """Outputs in their structure; they require grad where they depend on what does."""
    with subject.step():
        for number in range(subject.count):
            subject.expect_outputs(subject.forward(number), number)
            subject.program.backward(number, Kind.B, (), ())


@_check()
def whole_backward(subject: ProgramSubject) -> None:
    """B gives the inputs' gradients, None where there is none, accumulates the parameters', and leaves the inputs' grad alone."""
    with subject.step():
        received = subject.received(0)
        subject.expect_input_grads(subject.backward(0, Kind.B, subject.forward(0, received)), 0)
        _expect(all(tensor.grad is None for tensor in received), "gradients of inputs are returned, not left in .grad")
    subject.expect_parameter_grads()


@_check()
def backward_in_two_parts(subject: ProgramSubject) -> None:
    """I gives the inputs' gradients; after W the parameters' are those of B, and W returns nothing."""
    with subject.step():
        outputs = subject.forward(0)
        subject.expect_input_grads(subject.backward(0, Kind.I, outputs), 0)
        rest = subject.program.backward(0, Kind.W, (), ())
        _expect(len(rest) == 0, f"W returns an empty tuple, got {rest!r}")
    subject.expect_parameter_grads()


@_check()
def microbatches_in_flight(subject: ProgramSubject) -> None:
    """Forwards, whole backwards and parts of several microbatches in any order."""
    last = subject.count - 1
    with subject.step():
        outputs = [subject.forward(number) for number in range(subject.count)]
        subject.expect_input_grads(subject.backward(1, Kind.I, outputs[1]), 1)
        subject.expect_input_grads(subject.backward(last, Kind.I, outputs[last]), last)
        subject.expect_input_grads(subject.backward(0, Kind.B, outputs[0]), 0)
        subject.program.backward(last, Kind.W, (), ())
        again = subject.forward(0)
        subject.program.backward(1, Kind.W, (), ())
        subject.expect_input_grads(subject.backward(0, Kind.B, again), 0)
    subject.expect_parameter_grads()


@_check()
def gradients_add_up(subject: ProgramSubject) -> None:
    """Over microbatches and steps, until somebody takes them away; a parameter that nothing depends on has None."""
    for kinds in ((Kind.B,), (Kind.I, Kind.W)):
        with subject.step():
            for number in range(subject.count):
                outputs = subject.forward(number)
                subject.expect_input_grads(subject.backward(number, kinds[0], outputs), number)
                for kind in kinds[1:]:
                    subject.program.backward(number, kind, (), ())
        subject.expect_parameter_grads()


@_check()
def starts_from_a_loss(subject: ProgramSubject) -> None:
    """A scalar that was computed from the outputs is a root too, with a gradient or, for one, None."""
    for kind, grad in ((Kind.B, None), (Kind.B, torch.tensor(0.5)), (Kind.I, None)):
        with subject.step():
            received = subject.received(0)
            found = subject.program.backward(0, kind, [_loss(subject.forward(0, received))], [grad])
            if kind is Kind.I:
                subject.program.backward(0, Kind.W, (), ())
        inputs = subject.received(0)
        torch.autograd.backward([_loss(subject.reference(*inputs))], [grad])
        for position, (mine, tensor) in enumerate(zip(found, inputs, strict=True)):
            _same_grad(mine, tensor.grad, f"the gradient of input {position}")
    subject.expect_parameter_grads()


@_check()
def nothing_to_start_from(subject: ProgramSubject) -> None:
    """A microbatch of no weight: no roots, no gradients."""
    with subject.step():
        for kind in (Kind.B, Kind.I):
            received = subject.received(0)
            subject.forward(0, received)
            found = subject.program.backward(0, kind, (), ())
            _expect(
                len(found) == len(received) and all(grad is None for grad in found),
                f"expected None for each of {len(received)} inputs, got {found!r}",
            )
        subject.program.backward(0, Kind.W, (), ())
    subject.expect_parameter_grads()


@_check()
def first_stage(subject: ProgramSubject) -> None:
    """Nothing is received: the caller's arguments come from ``call``, by position or by name."""
    names = list(inspect.signature(subject.reference.forward).parameters)
    for number, kind in enumerate((Kind.B, Kind.I)):
        values = [tensor.detach() for tensor in subject.received(number)]
        given = ((), dict(zip(names, values, strict=False))) if number else (tuple(values), {})
        with subject.step():
            outputs = subject.program.forward(number, (), functools.partial(_ignore, given))
            found = subject.backward(number, kind, outputs)
            _expect(len(found) == 0, f"nothing was received, and {kind.value} returned {found!r}")
            if kind is Kind.I:
                subject.program.backward(number, Kind.W, (), ())
        subject.run_reference(values, number)
    subject.expect_parameter_grads()


@_check(is_frozen=True)
def frozen_parameters(subject: ProgramSubject) -> None:
    """The inputs' gradients are there all the same; parameters keep None."""
    with subject.step():
        outputs = subject.forward(0)
        subject.expect_outputs(outputs, 0)
        subject.expect_input_grads(subject.backward(0, Kind.I, outputs), 0)
        subject.program.backward(0, Kind.W, (), ())
    subject.expect_parameter_grads()


@_check()
def evaluation(subject: ProgramSubject) -> None:
    """Without gradients: the same outputs, none requires grad, nothing is kept, and what is under way is not disturbed."""
    with subject.step():
        outputs = subject.forward(0)
        with torch.no_grad():
            received = subject.received(1)
            found = subject.forward(1, received)
            leaves = normalize_outputs(found).leaves
            _expect(not any(leaf.requires_grad for leaf in leaves), "outputs without gradients require none")
            subject.expect_outputs(found, 1)
        kept = [weakref.ref(tensor) for tensor in (*received, *leaves)]
        del received, found, leaves
        _expect(all(tensor() is None for tensor in kept), "an evaluation keeps tensors")
        subject.expect_input_grads(subject.backward(0, Kind.B, outputs), 0)
    subject.expect_parameter_grads()


@_check()
def nothing_is_kept(subject: ProgramSubject) -> None:
    """After B, or after W, no received tensor and no output is held, nor by a cycle that waits for the collector."""
    for kinds in ((Kind.B,), (Kind.I, Kind.W)):
        with subject.step():
            received = subject.received(0)
            outputs = subject.forward(0, received)
            kept = [weakref.ref(tensor) for tensor in (*received, *normalize_outputs(outputs).leaves)]
            subject.backward(0, kinds[0], outputs)
            del received, outputs
            for kind in kinds[1:]:
                subject.program.backward(0, kind, (), ())
            held = [number for number, tensor in enumerate(kept) if tensor() is not None]
            _expect(not held, f"after {kinds[-1].value} it holds {len(held)} of {len(kept)} inputs and outputs")


@_check()
def nothing_is_kept_of_a_step_that_failed(subject: ProgramSubject) -> None:
    """Where the program has a ``clear()``: microbatches that were begun are let go, and numbers begin anew."""
    clear = getattr(subject.program, "clear", None)
    if clear is None:
        return
    kept = []
    with subject.step():
        for kind in (None, Kind.I):
            received = subject.received(0)
            outputs = subject.forward(0, received)
            kept += [weakref.ref(tensor) for tensor in (*received, *normalize_outputs(outputs).leaves)]
            if kind is not None:
                subject.backward(0, kind, outputs)
            del received, outputs
    clear()
    held = sum(tensor() is not None for tensor in kept)
    _expect(not held, f"after clear() it holds {held} of {len(kept)} inputs and outputs")
    _raises(Exception, "W whose I was cleared", lambda: subject.program.backward(0, Kind.W, (), ()))
    subject.forget()
    with subject.step():
        subject.expect_input_grads(subject.backward(0, Kind.B, subject.forward(0)), 0)
    subject.expect_parameter_grads()


@_check()
def errors_come_through(subject: ProgramSubject) -> None:
    """What ``call`` or the computation raises; parts in a wrong order; and afterwards it runs as before."""

    def fails(_: Sequence[torch.Tensor]) -> Any:
        raise ZeroDivisionError("on purpose")

    with subject.step():
        _raises(ZeroDivisionError, "what call() raises", lambda: subject.program.forward(0, subject.received(0), fails))
        _raises(Exception, "W without its I", lambda: subject.program.backward(1, Kind.W, (), ()))
        _raises(Exception, "B without its F", lambda: subject.program.backward(1, Kind.B, (), ()))
        outputs = subject.forward(2)
        _raises(Exception, "a backward of kind F", lambda: subject.backward(2, Kind.F, outputs))
    with subject.step():  # the next step: microbatches that were begun count no more
        for number in range(subject.count):
            subject.expect_input_grads(subject.backward(number, Kind.B, subject.forward(number)), number)
    subject.expect_parameter_grads()


class _Sample(nn.Module):
    """What programs are tried on: values with and without gradient, a weight used twice, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-0.5, 0.5, generator=generator))

        self.weight, self.bias, self.table, self.unused = drawn(4, 4), drawn(4), drawn(3, 4), drawn(2)

    def forward(self, hidden: torch.Tensor, skipped: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        found = torch.tanh(nn.functional.linear(hidden, self.weight, self.bias)) + self.table[ids]
        found = nn.functional.linear(found, self.weight)
        return {"hidden": found, "both": (found * hidden, ids > 0)}


def _sample_microbatches() -> list[list[torch.Tensor]]:
    """Sizes differ; nothing depends on the second value."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(rows, 4, generator=generator).requires_grad_(),
            torch.randn(rows, 2, generator=generator).requires_grad_(),
            torch.randint(3, (rows,), generator=generator),
        ]
        for rows in (2, 3, 2, 1)
    ]


def _ignore(given: Any, _: Sequence[torch.Tensor]) -> Any:
    return given


def _grad_of(root: torch.Tensor, number: int) -> torch.Tensor:
    steps = torch.arange(root.numel(), dtype=torch.float64).reshape(root.shape)
    return torch.cos(steps + number).to(root.dtype)


def _loss(outputs: Any) -> torch.Tensor:
    leaves = normalize_outputs(outputs).leaves
    return torch.stack([leaf.square().mean() for leaf in leaves if leaf.requires_grad]).sum()


def _expect(condition: object, otherwise: str) -> None:
    if not condition:
        raise ProgramCheckError(otherwise)


def _close(mine: torch.Tensor, right: torch.Tensor, what: str) -> None:
    try:
        torch.testing.assert_close(mine.detach(), right.detach())
    except AssertionError as error:
        raise ProgramCheckError(f"{what}: {error}") from error


def _same_grad(mine: torch.Tensor | None, right: torch.Tensor | None, what: str) -> None:
    if mine is None or right is None:
        _expect(mine is right, f"{what}: expected {right}, got {mine}")
        return
    _close(mine, right, what)


def _raises(kind: type[Exception], what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except kind:
        return
    except Exception as error:
        raise ProgramCheckError(f"{what}: expected {kind.__name__}, got {error!r}") from error
    raise ProgramCheckError(f"{what}: expected an error, and nothing was raised")
