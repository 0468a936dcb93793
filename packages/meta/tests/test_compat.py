"""The private torch names: what this torch has, and what happens on one that lacks them."""

from __future__ import annotations

import sys
from collections import OrderedDict

from torch.utils import _pytree

from stepwell_meta import _compat
from stepwell_meta.testing import WorkerPool

# Runs stepwell-meta, imported anew, in a process whose torch has none of the private names.
WITHOUT = """
import torch
from torch.distributed.tensor import placement_types, Shard
import torch.utils._pytree as pytree
import torch._subclasses.fake_tensor as fake
import torch.distributed._functional_collectives as funcol
from collections import OrderedDict
mode = fake.FakeTensorMode()
with mode:
    faked = torch.zeros(2)
max_result = torch.max(torch.zeros(2, 2), 0)
del placement_types._StridedShard, pytree.SUPPORTED_NODES, fake.FakeTensor, funcol.AsyncCollectiveTensor
from stepwell_meta import *
meta = DTensorMeta((2,), (1,), torch.float32, False, (4,), (1,), (Shard(0),), MeshKey(None, (2,), (1,)))
data = encode(meta)
assert decode(data) == meta
assert data.endswith(bytes([1, 0]))
def refusal(call):
    try:
        call()
    except MetadataError as error:
        return str(error)
print(refusal(lambda: decode(data[:-2] + bytes([3, 0, 2]))))
print(refusal(lambda: extract_meta(faked)))
print(refusal(lambda: normalize_outputs(max_result)))
value = OrderedDict(a=torch.zeros(1), b=[None, (1, 2)])
outputs = normalize_outputs(value)
assert outputs.structure.rebuild(outputs.leaves) == value
"""


def without_the_names() -> list[str]:
    lines: list[str] = []
    used = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("stepwell_meta")}
    exec(WITHOUT, {"print": lines.append})
    sys.modules.update(used)  # the worker's own, by which it answers
    return lines


def test_without_the_names_only_what_needs_them_is_refused() -> None:
    with WorkerPool(max_size=1) as pool:  # not the session's: what torch loses there does not come back
        (lines,) = pool.run(without_the_names, 1, init_group=False)
    strided, fake, registered = lines
    assert strided.startswith("metadata has a placement 3 that this torch does not have")
    assert fake.endswith("got torch._subclasses.fake_tensor.FakeTensor")
    assert registered.startswith("outputs: cannot send a torch.return_types.max to another stage")


def test_this_torch_has_every_name() -> None:
    for name in ("AsyncCollectiveTensor", "FakeTensor", "StridedShard"):
        assert getattr(_compat, name).__module__.startswith("torch.")
    rule = _compat.container_rule(OrderedDict)
    assert rule.unflatten_fn([1], ["a"]) == OrderedDict(a=1)


def test_containers_are_looked_up_at_the_time_of_use() -> None:
    class Late(list[int]):
        pass

    assert _compat.container_rule(Late) is None
    assert _compat.container_classes(lambda cls: cls is Late) == ()
    _pytree.register_pytree_node(Late, lambda value: (list(value), None), lambda values, _: Late(values))
    assert _compat.container_rule(Late).unflatten_fn([1], None) == Late([1])
    assert _compat.container_classes(lambda cls: cls is Late) == (Late,)


def test_constants_contain_nothing() -> None:
    _pytree.register_constant(Fixed)
    assert _compat.container_rule(Fixed) is None


class Fixed:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed)

    def __hash__(self) -> int:
        return 0
