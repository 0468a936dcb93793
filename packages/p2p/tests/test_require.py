"""Arguments of the wrong kind are refused in a sentence, before anything is worked out from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepwell_p2p import (
    C10dTransport,
    Edge,
    LoopbackFabric,
    Op,
    OpKind,
    Packing,
    Placement,
    Post,
    Rules,
    Wait,
    Wire,
    chain_wires,
    channels_for,
    edges_of,
    expect_values,
    plan_packs,
    prove_order,
    send_values,
)
from stepwell_p2p.exceptions import P2PUsageError

PLACEMENT = Placement.loop(2, 2)
RULES = Rules(tagged=False, rendezvous=True)
SEND = Op(OpKind.SEND_F, Edge(0, 1), 0, 0)


def proof(*sequences: Any) -> object:
    return prove_order(sequences, "shared", RULES)


CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "half a stage": (lambda: Placement.loop(2.0, 2), "num_stages must be a whole number, got 2.0, a float"),
    "ranks in words": (lambda: Placement.v(2, "2"), "num_ranks must be a whole number, got '2', a str"),
    "one rank": (lambda: Placement(3), "a placement is of several ranks, that of each stage, got 3"),
    "ranks that are texts": (lambda: Placement.custom("01"), "a placement is of several ranks"),
    "a rank that is none": (lambda: Placement([0, None]), "the rank of a stage must be a whole number, got None"),
    "a wire from a text": (lambda: Wire("0", 0, 1, 0), "the source of a wire must be a whole number, got '0'"),
    "a wire to half a stage": (lambda: Wire(0, 0, 1.5, 0), "the destination of a wire must be a whole number, got 1.5"),
    "no stages": (lambda: chain_wires(None), "num_stages must be a whole number, got None"),
    "half a value": (lambda: chain_wires(2, 0.5), "num_values must be a whole number, got 0.5"),
    "values in words": (lambda: chain_wires(2, ["one"]), "a number of values must be a whole number, got 'one'"),
    "edges of ranks": (lambda: edges_of([0, 1], ()), "edges are of a placement, got [0, 1]; Placement.loop"),
    "no wires": (
        lambda: channels_for(PLACEMENT, None),
        "wires are several, for example chain_wires(num_stages), got None",
    ),
    "wires that are pairs": (lambda: channels_for(PLACEMENT, [(0, 1)]), "edges are of wires, got (0, 1); chain_wires"),
    "a post of one op": (lambda: Post(SEND), "a Post has several Ops, got Op("),
    "a post of texts": (lambda: proof([Post(["F0"])]), "rank 0 posts Ops, got 'F0'"),
    "a wait for a text": (lambda: proof([Wait("0")]), "the post that rank 0 waits for must be a whole number, got '0'"),
    "no sequence": (lambda: proof(None), "the sequence of rank 0 is of several steps, got None"),
    "no sequences": (lambda: prove_order(3, "shared", RULES), "sequences are several, one for each rank, got 3"),
    "no rules": (lambda: prove_order([], "shared", None), "prove_order() takes the rules of a transport, got None"),
    "one meta": (lambda: plan_packs(3), "what is packed is told as several TensorMetas, got 3"),
    "metas that are shapes": (lambda: plan_packs([(2,)]), "what is packed is told as TensorMetas, got (2,)"),
    "nothing that is packed": (lambda: Packing([None]), "what is packed is told as TensorMetas, got None"),
    "a size in words": (lambda: plan_packs([], small="64K"), "small is a number of bytes, got '64K'"),
    "rules of a fabric": (lambda: LoopbackFabric(2, rules="tagged"), "the rules of a fabric are Rules, or None"),
    "a stall in words": (lambda: LoopbackFabric(2, stall_after="1 s"), "stall_after is a number of seconds, got '1 s'"),
    "a timeout in words": (lambda: C10dTransport(timeout="1 s"), "timeout is a number of seconds, or None"),
    "no stall": (lambda: C10dTransport(stall_after=None), "stall_after is a number of seconds, got None"),
    "a text to send": (lambda: send_values(fabric_end(), SEND, "text"), "the payload of values is bytes, got 'text'"),
    "one tensor": (
        lambda: send_values(fabric_end(), SEND, b"", torch.zeros(2)),
        "tensors are several, in a list, got a Tensor",
    ),
    "no limit": (
        lambda: expect_values(fabric_end(), SEND.mirror, most_bytes=None),
        "most_bytes must be a whole number",
    ),
}


def fabric_end() -> Any:
    return LoopbackFabric(2).transport(0)


@pytest.mark.parametrize(("wrong", "sentence"), CASES.values(), ids=CASES)
def test_they_are_refused_with_a_sentence(wrong: Callable[[], object], sentence: str) -> None:
    """They ended in errors of Python's own, from deep inside, or were taken and failed later."""
    with pytest.raises(P2PUsageError) as raised:
        wrong()
    assert str(raised.value).startswith(sentence)
