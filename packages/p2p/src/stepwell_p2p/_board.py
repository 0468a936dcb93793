"""The place where the ranks of one group tell each other that something failed, and the thread that watches it.

gloo has no way to wake a thread that waits for a peer which is alive but will never answer: ``ProcessGroupGloo.abort`` leaves it
asleep. So each rank keeps one daemon thread that looks at a key in the group's store. The first rank to fail writes the key;
the threads see it, note the cause, and wake their rank's waits (how is the transport's business). The same thread notices waits
that take long, writes down for the others what this rank waits for, and compares notes with the other end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch.distributed as dist

from ._failure import Failure

_log = logging.getLogger(__name__)

_FAILURE = "failure"  # the key in the store

_POLL = 0.2  # seconds between two looks at the store
_LOST_AFTER = 1.0  # seconds that a store may be unreachable while something is pending
_PROBE_EVERY = 1.0  # seconds between two attempts to find out whether a peer of a long wait lives
_NOTE_AFTER = 1.0  # seconds after which an unfinished message is written down for the other ranks


@attrs.frozen
class Note:
    """What one rank says about a message that it has waited for a long time.

    Attributes:
        message: the op's :attr:`~stepwell_p2p.Op.message`, and how many came under that op before: notes are read late, so only
            the same one of several may be compared.
        words: the op for a person.
        peer: the rank at the other end.
        form: dtype and shape that this end expects, or sends.
        seconds: how long ago it was posted.
        waiting: whether the rank is blocked for it now.
    """

    message: tuple[object, ...]
    words: str
    peer: int
    form: str
    seconds: float
    waiting: bool


class Watched(Protocol):
    """What the thread needs of a transport's shared state."""

    def notes(self, older_than: float) -> Sequence[Note]:
        """The unfinished messages that were posted longer ago than this, those that are waited for first."""
        ...

    def probe(self) -> Failure | None:
        """Why a long wait will not end, where that can be found out; called about once a second while there are any."""
        ...

    def wake(self, failure: Failure) -> None:
        """Make every pending wait of this rank raise."""
        ...


def failure_in(store: dist.Store) -> Failure | None:
    """The first failure that a rank of the group has reported, if any; see :class:`FailureBoard` for the store."""
    return Failure.from_bytes(store.get(_FAILURE)) if store.check([_FAILURE]) else None


class FailureBoard:
    """One rank's view of the first failure of its group.

    Args:
        store: shared by exactly the ranks of this group, fresh for this use.
        rank: this rank.
        size: number of ranks.
        watched: whose waits to look after; held weakly.
        stall_after: seconds after which a wait is reported.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, watched: Watched, *, stall_after: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._watched = weakref.ref(watched)
        self._stall_after = stall_after
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._lost_since: float | None = None
        self._noted: set[tuple[object, ...]] = set()
        self._told: set[tuple[object, ...]] = set()
        self._probed = 0.0
        self.failure: Failure | None = None
        self._thread = threading.Thread(target=self._run, name=f"stepwell-p2p-board-{rank}", daemon=True)
        self._thread.start()

    def report(self, failure: Failure) -> Failure:
        """Tell every rank; the first report of all ranks wins and is returned. Never waits for a peer."""
        with self._lock:
            if self.failure is None:
                try:
                    first = self._store.compare_set(_FAILURE, "", failure.to_bytes().decode())
                    self.failure = Failure.from_bytes(first)
                except RuntimeError:  # the store's host is gone: the others will notice that by themselves
                    self.failure = failure
            return self.failure

    def look(self) -> Failure | None:
        """The first failure, if there is one by now. Asks the store."""
        if self.failure is None:
            self.failure = failure_in(self._store)
        return self.failure

    def root_of(self, peer: int) -> tuple[int, str]:
        """Follow who waits for whom, from a peer that does not answer to the rank that waits for nobody.

        Returns:
            That rank, and in words how it was found.
        """
        seen = [peer]
        words: list[str] = []
        while True:
            notes = [note for note in self._notes_of(seen[-1]) if note.waiting]
            if not notes:
                return seen[-1], "; ".join([*words, f"rank {seen[-1]} does not say that it waits for anybody"])
            words.append(f"rank {seen[-1]} waits for {notes[0].words}")
            if notes[0].peer in seen or notes[0].peer == self._rank:
                return peer, "; ".join([*words, "they wait for each other (prove_order explains a bad order)"])
            seen.append(notes[0].peer)

    def publish(self) -> None:
        """Write down for the others what this rank waits for."""
        watched = self._watched()
        notes = watched.notes(0.0) if watched is not None else ()
        with contextlib.suppress(RuntimeError):  # a store that is gone has no readers either
            self._store.set(f"waits/{self._rank}", json.dumps([attrs.astuple(note) for note in notes[:64]]))

    def close(self) -> None:
        """End the thread. Safe to call twice, from any thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _notes_of(self, rank: int) -> list[Note]:
        try:
            key = f"waits/{rank}"
            if rank == self._rank or not self._store.check([key]):
                return []
            rows = json.loads(self._store.get(key))
            return [Note(tuple(message), *rest) for message, *rest in rows]
        except (RuntimeError, ValueError, TypeError):
            return []

    def _run(self) -> None:
        while not self._stop.wait(_POLL):
            watched = self._watched()
            if watched is None:
                return
            failure = self._poll(watched)
            if failure is not None:
                watched.wake(failure)
                return
            del watched

    def _poll(self, watched: Watched) -> Failure | None:
        try:
            failure = self.look()
            self._lost_since = None
        except RuntimeError as error:
            return self._without_store(watched, str(error))
        if failure is None:
            failure = self._look_at_stalls(watched)
        return failure

    def _without_store(self, watched: Watched, error: str) -> Failure | None:
        """A run that ends in good order loses its store too, so only a rank that still waits for something minds."""
        now = time.monotonic()
        if self._lost_since is None or not watched.notes(0.0):
            self._lost_since = now
        if now - self._lost_since < _LOST_AFTER:
            return None
        with self._lock:
            if self.failure is None:
                self.failure = Failure(
                    f"the group's store cannot be reached, so the rank that hosts it has ended ({error})"
                )
        return self.failure

    def _look_at_stalls(self, watched: Watched) -> Failure | None:
        notes = watched.notes(_NOTE_AFTER)
        known = {note.message for note in notes}
        if known != self._noted:
            self._noted = known
            self.publish()
        if notes and time.monotonic() - self._probed >= _PROBE_EVERY:
            self._probed = time.monotonic()
            if (failure := watched.probe()) is not None:
                return self.report(failure)
        self._warn([note for note in notes if note.waiting and note.seconds >= self._stall_after])
        forms = {
            (peer, theirs.message): theirs.form
            for peer in {note.peer for note in notes}
            for theirs in self._notes_of(peer)
        }
        for note in notes:
            form = forms.get((note.peer, note.message), note.form)
            if form != note.form:
                return self.report(
                    Failure(
                        f"both ends of one message disagree: {note.words} is {note.form} on rank {self._rank}"
                        f" and {form} on rank {note.peer}; agree on shape and dtype before posting",
                        self._rank,
                    )
                )
        return None

    def _warn(self, stalled: Sequence[Note]) -> None:
        fresh = [note for note in stalled if note.message not in self._told]
        self._told = {note.message for note in stalled}
        if fresh:
            words = "; ".join(note.words for note in fresh[:8])
            _, root = self.root_of(fresh[0].peer)
            _log.warning("rank %d has waited %.0f s for %s (%s)", self._rank, fresh[0].seconds, words, root)
