"""FLOPs of operators that torch's own table lacks."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verified_fsdp2.verifier.probe.compat.flops import formula

GROUPS, ROWS, IN, OUT = 4, 32, 16, 8
ENDS = torch.tensor([0, 8, 24, ROWS], dtype=torch.int32)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((ROWS, IN), (GROUPS, IN, OUT)),  # a forward: rows are split among the groups
        ((IN, ROWS), (ROWS, OUT)),  # of the weights' gradient: what is summed is split
        ((GROUPS, OUT, IN), (IN, ROWS)),
        ((GROUPS, ROWS // GROUPS, IN), (GROUPS, IN, OUT)),
    ],
)
def test_groups_share_their_rows(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    made = [torch.empty(one, dtype=torch.bfloat16, device="meta") for one in (a, b)]
    count = formula(torch.ops.aten._grouped_mm.default)
    assert count is not None and count(*made, offs=ENDS, out_val=None) == 2 * ROWS * IN * OUT


@pytest.mark.parametrize(
    "text",
    [
        "torch.mm(a, b)",
        "torch.mm(a, b, out=c)",
        "torch.addmm(c, a, b)",
        "torch.addmm(c, a, b, out=c)",
        "c.addmm_(a, b)",
        "torch.bmm(a[None], b[None], out=c[None])",
        "torch.baddbmm(c[None], a[None], b[None])",
        "c[None].baddbmm_(a[None], b[None])",
        "torch.addbmm(c, a[None], b[None])",
        "c.addbmm_(a[None], b[None])",
        "torch._addmm_activation(c[0], a, b)",
        "torch._C._nn.linear(a, b.T, out=c)",
        "torch.einsum('ij,jk->ik', a, b)",
    ],
)
def test_a_product_costs_the_same_in_place(text: str) -> None:
    found = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if (count := formula(func)) is not None:
                found.append(count(*args, **(kwargs or {}), out_val=result))
            return result

    a, b, c = torch.zeros(ROWS, IN), torch.zeros(IN, OUT), torch.zeros(ROWS, OUT)
    with Seen(), torch.no_grad():
        eval(text, {"torch": torch, "a": a, "b": b, "c": c})
    assert found == [2 * ROWS * IN * OUT]
