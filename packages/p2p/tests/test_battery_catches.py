"""The battery finds out a transport that breaks any one rule of the protocol, and names the rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from p2p_broken import (
    AcceptsOtherKinds,
    AcceptsOtherRanks,
    AcceptsRanksThatAreNone,
    ASecondWaitDiffers,
    ASecondWaitIsEmpty,
    BatchesInTurn,
    CarriesFloats,
    CutsOff,
    FillsBuffersAsTheyLie,
    ForgetsIndex,
    ForgetsKind,
    ForgetsMicrobatch,
    ForgetsStage,
    IgnoresBuffers,
    IgnoresStrides,
    Kept,
    LastComesFirst,
    Later,
    LooksAtOpsOnce,
    LosesWhatIsNoNumber,
    MakesUp,
    MatchesByArrival,
    NoSelfSends,
    NotBuffered,
    NotTagged,
    PostsAfterFailure,
    PostsBlock,
    ReadsAfterTheWait,
    ReadsMemoryAsItLies,
    RequiresGrad,
    SendsBlock,
    Shared,
    SharesWithTheSender,
    SmallOvertakesLarge,
    StartsWhatIsGood,
    StartsWhenWaitedFor,
    TakesAnyBuffer,
    TakesFromAnyRank,
    UsesMemoryAgain,
    ValuesInAnotherOrder,
    WhoWaitsFirstIsServedFirst,
)

from stepwell_p2p import Recv, Send
from stepwell_p2p.exceptions import P2PUsageError, TransportError
from stepwell_p2p.testing import TRANSPORT_CHECKS, ThreadFabric, TransportCheckError, check_transport

CHECKS = {check.name: check for check in TRANSPORT_CHECKS}


# ---- how it ends


class TellsNobody(Kept):
    def abort(self, reason: str, **where: Any) -> None:
        if "reason" not in reason:  # what the check's own threads report stays
            super().abort(reason, **where)


class TellsTheOthersOnly(Kept):
    """The rank that aborts goes on as if nothing had been."""

    aborted = False

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        if self.aborted:
            return Later(tuple)
        handle = self.inner.post(batch)

        def wait() -> Any:
            return () if self.aborted else handle.wait()

        return Later(wait)

    def abort(self, reason: str, **where: Any) -> None:
        self.aborted = True
        super().abort(reason, **where)


class ForgetsWhere(Kept):
    def abort(self, reason: str, **where: Any) -> None:
        super().abort(reason)


class TheLastAbortWins(Kept):
    def abort(self, reason: str, **where: Any) -> None:
        with self.inner.fabric._lock:
            self.inner.fabric._failure = None
        super().abort(reason, **where)


class AbortWaits(Kept):
    def abort(self, reason: str, **where: Any) -> None:
        if reason == "the reason":
            time.sleep(2.5)
        super().abort(reason, **where)


class WakesTheWaitsOfNow(Kept):
    """An abort ends the waits that are under way, and none that begins later."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        handle = self.inner.post(batch)

        def wait() -> Any:
            if self.inner.fabric._failure is not None:
                raise TransportError("nothing came")
            return handle.wait()

        return Later(wait)


class DeathIsNotNoticed(Kept):
    """Nobody says that a rank has ended: they find out at the timeout."""

    def abort(self, reason: str, **where: Any) -> None:
        if reason != "its thread ended":
            super().abort(reason, **where)


class ClosesOnce(Kept):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class CloseFails(Kept):
    """Found out by any check: what a transport raises when a rank is done was told to nobody."""

    def close(self) -> None:
        super().close()
        raise RuntimeError("cannot release the channels")


class PostsAfterClose(Kept):
    def post(self, batch: Sequence[Send | Recv]) -> Any:
        return Later(tuple) if self.inner.fabric._closed[self.rank] else self.inner.post(batch)


class ClosesForAll(Kept):
    """The first rank that closes takes the fabric along."""

    def post(self, batch: Sequence[Send | Recv]) -> Any:
        if self.shared.closed.is_set():
            raise P2PUsageError("the fabric is closed")
        return self.inner.post(batch)

    def close(self) -> None:
        self.shared.closed.set()
        super().close()


class CountsWrong(Kept):
    def __init__(self, shared: Shared, rank: int) -> None:
        super().__init__(shared, rank)
        self.size += 1


FOUND = [
    (PostsBlock, "early_and_late", "posting never blocks"),
    (SendsBlock, "early_and_late", "posting never blocks"),
    (StartsWhenWaitedFor, "starting", "Messages start when they are posted"),
    (BatchesInTurn, "pairs", "exchanges a value with every other"),
    (BatchesInTurn, "mixed_batches", "One batch with sends and receives"),
    (StartsWhatIsGood, "refusals", "with all of their batch"),
    (AcceptsOtherRanks, "refusals", "are refused when they are posted"),
    (AcceptsRanksThatAreNone, "refusals", "are refused when they are posted"),
    (AcceptsOtherKinds, "refusals", "are refused when they are posted"),
    (LooksAtOpsOnce, "refusals", "are refused when they are posted"),
    (TakesAnyBuffer, "refusals", "are refused when they are posted"),
    (PostsAfterFailure, "abort", "also at later waits and posts"),
    (MatchesByArrival, "matching", "by all of it"),
    (ForgetsKind, "matching", "by all of it"),
    (ForgetsStage, "matching", "by all of it"),
    (ForgetsMicrobatch, "matching", "by all of it"),
    (ForgetsIndex, "matching", "by all of it"),
    (TakesFromAnyRank, "sources", "from the rank that its op names"),
    (LastComesFirst, "ordering", "Messages of one op keep their order"),
    (SmallOvertakesLarge, "ordering", "large and small ones too"),
    (WhoWaitsFirstIsServedFirst, "ordering", "in whatever order their handles are waited for"),
    (NotBuffered, "buffered", "done when it is posted"),
    (NotTagged, "matching", "by all of it"),
    (NoSelfSends, "self_sends", "may send to itself"),
    (IgnoresStrides, "layouts", "in those that the receiver asks for"),
    (RequiresGrad, "layouts", "without grad"),
    (CarriesFloats, "dtypes", "bit for bit"),
    (LosesWhatIsNoNumber, "dtypes", "bit for bit"),
    (UsesMemoryAgain, "ownership", "sees the other's writes"),
    (ASecondWaitDiffers, "mixed_batches", "a second wait differs"),
    (ASecondWaitIsEmpty, "mixed_batches", "a second wait differs"),
    (ValuesInAnotherOrder, "mixed_batches", "in the order of the receives"),
    (SharesWithTheSender, "ownership", "neither sees the other's writes"),
    (ReadsAfterTheWait, "early_and_late", "A sent tensor is free after wait"),
    (ReadsMemoryAsItLies, "layouts", "whatever the sender's strides"),
    (IgnoresBuffers, "ownership", "did not return it"),
    (FillsBuffersAsTheyLie, "layouts", "or its buffer has"),
    (CutsOff, "too_much", "nothing is cut off"),
    (MakesUp, "too_little", "nothing is made up"),
    (TellsNobody, "abort", "wherever it waits, raises its reason"),
    (TellsTheOthersOnly, "abort", "every one"),
    (ForgetsWhere, "abort", "another cause"),
    (TheLastAbortWins, "abort", "The first reason wins"),
    (AbortWaits, "abort", "abort blocked"),
    (WakesTheWaitsOfNow, "abort", "also at later waits"),
    (DeathIsNotNoticed, "death", "raises within seconds"),
    (ClosesOnce, "refusals", "closed already"),
    (CloseFails, "pairs", "cannot release the channels"),
    (PostsAfterClose, "refusals", "everything after close"),
    (ClosesForAll, "leaving", "the others go on"),
    (CountsWrong, "pairs", "of 5"),
]


def run(broken: type[Kept], names: Sequence[str]) -> None:
    def make(size: int) -> ThreadFabric:
        def connect() -> Callable[[int], Any]:
            shared = Shared(size, broken.inner_rules)
            return lambda rank: broken(shared, rank)

        return ThreadFabric(size, connect)

    check_transport(make, checks=[CHECKS[name] for name in names], deadline=15)


@pytest.mark.parametrize(("broken", "check", "words"), FOUND, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_rule_is_found_out_and_named(broken: type[Kept], check: str, words: str) -> None:
    with pytest.raises(TransportCheckError, match=f"check '{check}' failed") as caught:
        run(broken, [check])
    assert words in str(caught.value)


def test_the_transport_that_they_break_keeps_every_rule() -> None:
    run(Kept, sorted({check for _, check, _ in FOUND}))


def test_every_check_finds_something_out() -> None:
    """But those that only do much of what others do too."""
    much = {"large", "thousands", "many_channels", "sizes", "both_directions", "values"}
    assert {check for _, check, _ in FOUND} == set(CHECKS) - much
