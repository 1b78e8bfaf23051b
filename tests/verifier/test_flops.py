"""FLOPs of operators that torch's own table lacks."""

import pytest
import torch

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
