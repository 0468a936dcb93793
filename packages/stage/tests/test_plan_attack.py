"""Legal and illegal schedules and plans at random, held against rules spelled out again, and against real transports."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell_meta import TensorMeta
from stepwell_p2p import ChannelPolicy, Edge, LoopbackFabric, Op, OpKind, Recv, Rules, Send, Transport
from stepwell_p2p.exceptions import DeadlockError, PeerFailure, TransportError
from stepwell_stage import Action, Costs, Kind, Plan, Schedule, lower, prove, simulate
from stepwell_stage.exceptions import ScheduleError
from stepwell_stage.plan._random import random_links, random_schedule

SENDS, RECVS, WAITS = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B), (Kind.WAIT_F, Kind.WAIT_B)
RULES = st.builds(Rules, tagged=st.booleans(), rendezvous=st.booleans())


def needs(leaf: Action, last: int) -> list[tuple[str, int, int | None]]:
    """What a compute action takes, as (forward, backward or input; stage; microbatch)."""
    stage, microbatch = leaf.stage, leaf.microbatch
    if leaf.kind is Kind.F:
        return [("F", stage - 1, microbatch)] if stage else []
    if leaf.kind is Kind.W:
        return [("I", stage, microbatch)]
    if leaf.kind.is_backward:
        return [("F", stage, microbatch), *([("B", stage + 1, microbatch)] if stage < last else [])]
    return []


def gives(leaf: Action) -> set[tuple[str, int, int | None]]:
    names = {Kind.F: "F", Kind.B: "B", Kind.I: "BI"}.get(leaf.kind, "")
    return {(name, leaf.stage, leaf.microbatch) for name in names}


def carry_out(rows: Sequence[Sequence[Action]], last: int) -> tuple[list[int], set[tuple[str, int, int | None]]]:
    """How far each rank gets, and what there is then: each takes a step whenever it can."""
    at, there = [0] * len(rows), set[tuple[str, int, int | None]]()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            leaves = row[at[rank]].leaves
            if all(need in there for leaf in leaves for need in needs(leaf, last)):
                for leaf in leaves:
                    there |= gives(leaf)
                at[rank] += 1
                moved = True
    return at, there


def swapped(rng: random.Random, rows: Sequence[Sequence[Action]], times: int) -> list[list[Action]]:
    """The same actions on each rank, in another order."""
    out = [list(row) for row in rows]
    for _ in range(times):
        row = rng.choice([row for row in out if row])
        first, second = rng.randrange(len(row)), rng.randrange(len(row))
        row.insert(first, row.pop(second))
    return out


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_an_order_is_legal_if_it_can_be_carried_out_and_else_the_first_action_that_cannot_is_named(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng, custom=True)
    last = schedule.placement.num_stages - 1
    rows = swapped(rng, schedule.actions, rng.randint(1, 4))
    at, there = carry_out(rows, last)
    stuck = next((rank for rank, row in enumerate(rows) if at[rank] < len(row)), None)
    if stuck is None:
        again = Schedule("again", schedule.placement, schedule.num_microbatches, rows)
        links = random_links(rng, last + 1)
        plan = lower(again, links)
        prove(plan, Rules(tagged=False, rendezvous=True))
        assert simulate(plan, Costs.uniform(last + 1)).makespan > 0
        return
    with pytest.raises(ScheduleError) as caught:
        Schedule("again", schedule.placement, schedule.num_microbatches, rows)
    action = rows[stuck][at[stuck]]
    assert str(caught.value).startswith(f"again: {action} on rank {stuck} can never run: it needs ")
    missing = Action.parse(str(caught.value).split("it needs ")[1].split(",")[0])
    assert any(gives(missing) & {need} for leaf in action.leaves for need in needs(leaf, last) if need not in there)


@attrs.define
class Rank:
    """What one rank has done so far; mutable: it goes on."""

    there: set[tuple[str, int, int | None]] = attrs.Factory(set)
    sent: set[tuple[Kind, int, int | None, int]] = attrs.Factory(set)
    received: set[tuple[Kind, int, int | None, int]] = attrs.Factory(set)
    waited: set[tuple[Kind, int, int | None, int]] = attrs.Factory(set)
    gathered: set[int] = attrs.Factory(set)
    reduced: set[int] = attrs.Factory(set)


def first_wrong(plan: Plan) -> tuple[int, int] | None:
    """Rank and place of the first action that comes before what it needs on its own rank, by the words of the docs."""
    for rank, row in enumerate(plan.actions):
        done, gathers = Rank(), {action.stage for action in row if action.kind is Kind.UNSHARD}
        for at in range(len(row)):
            if not allowed(plan, rank, at, done, gathers):
                return rank, at
    return None


def allowed(plan: Plan, rank: int, at: int, done: Rank, gathers: set[int]) -> bool:
    action, ranks = plan.actions[rank][at], plan.placement.ranks
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    ends = (
        {(kind, stage, microbatch, peer) for peer in plan.peers(action)} if kind in (*SENDS, *RECVS, *WAITS) else set()
    )
    if kind in SENDS:
        made = ("F" if kind is Kind.SEND_F else "B", stage, microbatch)
        if made not in done.there or ends & done.sent:
            return False
        done.sent |= ends
    elif kind in RECVS:
        if ends & done.received:
            return False
        done.received |= ends
    elif kind in WAITS:
        opened = {(SENDS[WAITS.index(kind)], *rest) for _, *rest in ends}
        if opened - done.sent or ends & done.waited:
            return False
        done.waited |= ends
    elif kind is Kind.UNSHARD:
        if stage in done.gathered:
            return False
        done.gathered.add(stage)
    elif kind is Kind.RESHARD:
        if stage not in done.gathered:
            return False
        done.gathered.remove(stage)
    elif kind is Kind.REDUCE_GRAD:
        rest = [leaf for later in plan.actions[rank][at:] for leaf in later.leaves if leaf.stage == stage]
        if stage in done.reduced or any(leaf.kind in (Kind.B, Kind.W) for leaf in rest):
            return False
        done.reduced.add(stage)
    else:
        for leaf in action.leaves:
            if leaf.kind is not Kind.CUSTOM and leaf.stage in gathers - done.gathered:
                return False
            for name, other, number in own_needs(leaf) + linked(plan, leaf):
                if ranks[other] == rank and (name, other, number) not in done.there:
                    return False
                taken = Kind.RECV_F if leaf.kind is Kind.F else Kind.RECV_B
                if ranks[other] != rank and (taken, leaf.stage, number, other) not in done.received:
                    return False
        for leaf in action.leaves:
            done.there |= gives(leaf)
    return True


def own_needs(leaf: Action) -> list[tuple[str, int, int | None]]:
    """What a compute action takes of its own stage."""
    return [need for need in needs(leaf, -1) if need[1] == leaf.stage]


def linked(plan: Plan, leaf: Action) -> list[tuple[str, int, int | None]]:
    """What a forward or backward takes over the plan's links."""
    if leaf.kind is Kind.F:
        return [("F", source, leaf.microbatch) for source, stage in plan.links if stage == leaf.stage]
    if leaf.kind.is_backward:
        return [("B", stage, leaf.microbatch) for source, stage in plan.links if source == leaf.stage]
    return []


def random_plan(rng: random.Random) -> Plan:
    schedule = random_schedule(rng, custom=True)
    stages = range(schedule.placement.num_stages)
    return lower(
        schedule,
        random_links(rng, len(stages)),
        prefetch=rng.randrange(3),
        sharded=[stage for stage in stages if rng.random() < 0.3],
        reduced=[stage for stage in stages if rng.random() < 0.3] if schedule.has_backward else [],
    )


def disturbed(rng: random.Random, plan: Plan) -> Plan:
    """The same plan with some of what lowering put in standing elsewhere, and perhaps something twice."""
    rows = [list(row) for row in plan.actions]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice([row for row in rows if row])
        moved = [at for at, action in enumerate(row) if not action.kind.is_compute]
        if moved:
            at = rng.choice(moved)
            action = row[at] if rng.random() < 0.15 else row.pop(at)
            near = rng.random() < 0.7
            row.insert(min(len(row), max(0, at + rng.randint(-2, 2))) if near else rng.randint(0, len(row)), action)
    return attrs.evolve(plan, actions=rows)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_first_wrong_action_of_a_plan_is_named(seed: int) -> None:
    rng = random.Random(seed)
    plan = disturbed(rng, random_plan(rng))
    wrong, said = first_wrong(plan), None
    try:
        prove(plan, Rules(tagged=True, rendezvous=False))
    except ScheduleError as error:
        said = str(error)
    except DeadlockError:
        pass  # what is wrong is not on one rank
    if wrong is None:
        assert said is None
    else:
        rank, at = wrong
        assert said is not None
        assert said.startswith(f"random: {plan.actions[rank][at]} on rank {rank} (action {at} of its plan): ")


@given(seed=st.integers(0, 2**32), policy=st.sampled_from(ChannelPolicy), rules=RULES)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_is_proved_runs_and_what_is_refused_blocks(seed: int, policy: ChannelPolicy, rules: Rules) -> None:
    """On a transport that keeps no more than the rules promise; plans as they are lowered, and disturbed ones."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    if rng.random() < 0.7:
        plan = disturbed(rng, plan)
    if len(plan.actions) == 1 or first_wrong(plan) is not None:
        return
    try:
        proof = prove(plan, rules, channels=policy)
    except DeadlockError:
        assert not runs(plan, rules, policy)
    else:
        assert runs(plan, rules, policy)
        for rank, row in enumerate(plan.actions):
            assert (proof.peak_activations[rank], proof.peak_receives[rank], proof.peak_sends[rank]) == peaks(plan, row)


def peaks(plan: Plan, row: Sequence[Action]) -> tuple[int, int, int]:
    """Activations held, receives posted and not used, sends posted and not waited for, at most."""
    found = Counter[str]()
    now = Counter[str]()
    keeps = any(leaf.kind in (Kind.B, Kind.I) for other in plan.actions for action in other for leaf in action.leaves)
    for action in row:
        count = len(plan.peers(action)) if action.kind in (*SENDS, *RECVS, *WAITS) else 0
        now["sends"] += count * ((action.kind in SENDS) - (action.kind in WAITS))
        now["receives"] += count * (action.kind in RECVS)
        for name in now:
            found[name] = max(found[name], now[name])
        for leaf in action.leaves:
            now["held"] += (leaf.kind is Kind.F and keeps) - (leaf.kind in (Kind.B, Kind.W))
            found["held"] = max(found["held"], now["held"])
            across = [other for _, other, _ in linked(plan, leaf)]
            now["receives"] -= sum(plan.placement.ranks[other] != plan.placement.ranks[leaf.stage] for other in across)
    return found["held"], found["receives"], found["sends"]


def runs(plan: Plan, rules: Rules, policy: ChannelPolicy) -> bool:
    """Whether the plan's messages get through a real transport that keeps no more than these rules."""
    fabric = LoopbackFabric(len(plan.actions), rules=rules, channels=policy, timeout=20)
    faults: list[BaseException] = []

    def work(rank: int) -> None:
        transport = fabric.transport(rank)
        try:
            for wait in play(plan, rank, transport):
                wait()
        except (TransportError, PeerFailure) as error:
            faults.append(error)
            transport.abort(str(error))
        finally:
            transport.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(plan.actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return not faults


def play(plan: Plan, rank: int, transport: Transport) -> Iterator[Callable[[], object]]:
    """Post what the plan posts; each wait when the plan waits, and in the end for what it never waits for."""
    ranks, meta = plan.placement.ranks, TensorMeta.from_tensor(torch.zeros(1))
    posted: dict[tuple[Kind, int, int | None], list[Callable[[], object]]] = {}
    for action in plan.actions[rank]:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind in (*SENDS, *RECVS):
            batch: list[Send | Recv] = []
            for peer in plan.peers(action):
                source, destination = (stage, peer) if kind in SENDS else (peer, stage)
                edge = Edge(ranks[source], ranks[destination])
                op = Op(OpKind(kind.value), edge, source, microbatch or 0, destination)
                batch.append(Send(op, torch.zeros(1)) if kind in SENDS else Recv(op, meta))
            posted.setdefault((kind, stage, microbatch), []).append(transport.post(batch).wait)
        elif kind in WAITS:
            yield from posted.pop((SENDS[WAITS.index(kind)], stage, microbatch))
        else:
            for leaf in action.leaves:
                if leaf.kind is Kind.F or leaf.kind.is_backward:
                    taken = Kind.RECV_F if leaf.kind is Kind.F else Kind.RECV_B
                    yield from posted.pop((taken, leaf.stage, leaf.microbatch), [])
    for waits in posted.values():
        yield from waits


@given(seed=st.integers(0, 2**32), rules=RULES, channels=st.sampled_from(ChannelPolicy))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_proved_of_pairs_as_one_holds_for_the_order_in_which_the_executor_posts(
    seed: int, rules: Rules, channels: ChannelPolicy
) -> None:
    """The executor sends what the forward of a pair made before it waits for the gradient that the backward takes."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    plan = lower(schedule, random_links(rng, schedule.placement.num_stages), prefetch=rng.randrange(4))
    if rng.random() < 0.7:
        plan = attrs.evolve(plan, actions=swapped(rng, plan.actions, rng.randint(1, 3)))
    try:
        proof = prove(plan, rules, channels=channels)
    except (ScheduleError, DeadlockError):
        return
    as_run = plan.with_pairs_apart()
    found = prove(as_run, rules, channels=channels)
    assert (found.num_messages, found.peak_activations) == (proof.num_messages, proof.peak_activations)
