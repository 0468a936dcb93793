"""The pipeline that the README writes by hand, with this layer alone, has the gradients of one process."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_pipeline_by_hand_has_the_gradients_of_one_process() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE))
    assert set(re.findall(r"stepwell_\w+", code)) == {"stepwell_meta", "stepwell_p2p"}  # no other layer helps
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    plain = copy.deepcopy(torch.nn.Sequential(*names["stages"]))
    plain.zero_grad()
    for microbatch in range(3):
        plain(torch.full((4, 8), float(microbatch))).sum().backward()
    for stage, alone in zip(names["stages"], plain, strict=True):
        assert torch.equal(stage.weight.grad, alone.weight.grad)
        assert torch.equal(stage.bias.grad, alone.bias.grad)
