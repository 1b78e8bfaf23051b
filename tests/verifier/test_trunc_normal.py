"""`nn.init.trunc_normal_` on sharded weights: each rank draws until its own part is in bounds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from verified_fsdp2.verifier.verdict import Verdict

MINIMAL = Path(__file__).parents[1] / "zoo" / "minimal.py"
BEFORE = "    optimizer = torch.optim.AdamW("


@pytest.mark.launch
def test_a_read_by_torch_is_no_partial_read(verify_script: Callable[..., Verdict], tmp_path: Path) -> None:
    text = MINIMAL.read_text(encoding="utf-8")
    drawn = "    with torch.no_grad():\n        nn.init.trunc_normal_(model.head.weight, 0.0, 0.02, -0.04, 0.04)\n"
    script = tmp_path / "train.py"
    script.write_text(text.replace(BEFORE, drawn + BEFORE), encoding="utf-8")
    (found,) = verify_script(script, ("grad-norm-item-partial",)).findings
    assert found.status == "pass"
