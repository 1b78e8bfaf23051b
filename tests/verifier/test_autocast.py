"""Autocast of CUDA on CPU tensors."""

import re
from pathlib import Path

import torch

from scripts import python
from verified_fsdp2.verifier.probe.compat import autocast

CASTS = """
import torch
import torch.nn.functional as F
from verified_fsdp2.verifier.probe.compat.autocast import cast_as_cuda

x = torch.randn(4, 8, requires_grad=True)
low = x.detach().bfloat16()
kept = cast_as_cuda()
with torch.autocast("cpu", torch.bfloat16):
    y = F.linear(x, x)
    float32 = [F.layer_norm(low, (8,)), low.softmax(-1), low.exp(), low.sum(), low.pow(2)]
    float32 += [F.rms_norm(low, (8,)), low.cumsum(0)]
    float32 += [F.cross_entropy(low, torch.zeros(4, dtype=torch.long))]
    float32 += [torch.linalg.vector_norm(low)]
    float32 += [torch.zeros(4, 8).index_put((torch.tensor([1]),), low[0])]
    float32 += [torch.zeros(4, 8).scatter_add(0, torch.zeros(4, 8).long(), low)]
    bfloat16 = [y, torch.mv(x, x[0]), F.gelu(low), low + 1, low.mean()]
    bfloat16 += [low.sum(dtype=torch.bfloat16)]
    double = F.layer_norm(x.double(), (8,))
assert {one.dtype for one in float32} == {torch.float32}, [one.dtype for one in float32]
assert {one.dtype for one in bfloat16} == {torch.bfloat16}, [one.dtype for one in bfloat16]
assert double.dtype is torch.float64
y.exp().sum().backward()
assert x.grad is not None and low.exp().dtype is torch.bfloat16  # off again
"""


def test_operators_are_cast_as_on_cuda() -> None:
    python("-c", CASTS)


def test_lists_are_those_of_torch() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8").replace("\\\n", " ")

    def listed(macro: str) -> set[str]:
        found = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert found is not None
        return {".".join(re.split(r",\s*", one)) for one in re.findall(r"_\(([^()]*)\)", found[1])}

    assert listed("AT_FORALL_FP32") == set(autocast._FLOAT32)
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == set(autocast._INTO_FLOAT32)
    assert listed("AT_FORALL_PROMOTE") - {"grid_sampler"} == set(autocast._WIDEST)
    assert set(autocast._LOW) <= listed("AT_FORALL_LOWER_PRECISION_FP")
