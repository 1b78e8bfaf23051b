"""Where DDP cannot be substituted for fully_shard, one process decides, by its own noise."""

import re
from pathlib import Path

import pytest

from corpus import TESTS
from records import cases

pytestmark = pytest.mark.launch

ONLY = ("matches-ddp", "matches-single-process")
AFTER = "    tokens = make_sequences(SAMPLES)\n    local"
ASKS = "    mesh = model.head.weight.device_mesh\n    assert mesh.size() == world\n"


RIGHT = pytest.param(("x", "x"), "pass", marks=pytest.mark.full)


@cases("edit, status", RIGHT, (("loss.backward()", "(loss * world).backward()"), "fail"))
def test_one_process_decides_alone(verify_script, tmp_path: Path, edit: tuple[str, str], status: str) -> None:
    text = (TESTS / "zoo" / "minimal.py").read_text(encoding="utf-8")
    assert text.count(AFTER) == 1 and edit[0] in text
    script = tmp_path / "train.py"
    script.write_text(text.replace(AFTER, ASKS + AFTER).replace(*edit), encoding="utf-8")
    verdict = verify_script(script, only=ONLY)
    found = {f.rule: f for f in verdict.findings}
    assert found["matches-ddp"].status == "inconclusive"
    assert "`mesh = model.head.weight.device_mesh`" in found["matches-ddp"].evidence
    assert found["matches-single-process"].status == status, found["matches-single-process"].evidence
    assert [r["role"] for r in verdict.runs] == ["train", "reference", "perturbed", "single"]
    assert [r["world_size"] for r in verdict.runs] == [2, 2, 1, 1]
    if status == "fail":
        one = found["matches-single-process"]
        assert one.measured == pytest.approx(1.0, abs=0.01)  # the loss is twice as large
        assert one.limit is not None and 2.0**-18 <= one.limit < 1e-2


@pytest.mark.full
@cases("change, status", RIGHT, (("lr=", "lr=2 * "), "fail"))
def test_a_script_for_one_process_is_an_oracle_too(
    verify_script, tmp_path: Path, change: tuple[str, str], status: str
) -> None:
    """Its model was never distributed: it runs on one rank, with the whole global batch."""
    text = (TESTS / "zoo" / "minimal.py").read_text(encoding="utf-8")
    plain = (
        text.replace('    dist.init_process_group("gloo")\n', "")
        .replace("dist.get_rank(), dist.get_world_size()", "0, 1")
        .replace("    dist.destroy_process_group()\n", "")
    )
    plain = re.sub(r".*(fully_shard|init_device_mesh|import torch.distributed).*\n", "", plain)
    plain = re.sub(r"    for block in model.blocks:\n", "", plain)
    assert "dist" not in plain
    (tmp_path / "before.py").write_text(plain.replace(*change, 1), encoding="utf-8")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    before = str(tmp_path / "before.py")
    (found,) = verify_script(tmp_path / "train.py", only=("matches-original",), reference=before).findings
    assert found.status == status, found.evidence
