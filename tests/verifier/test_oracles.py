"""Where DDP cannot be substituted for fully_shard, one process decides, by its own noise."""

import re
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from records import cases
from scripts import ZOO, edited, written

ONLY = ("matches-ddp", "matches-single-process")
AFTER = "    tokens = make_sequences(SAMPLES)\n    local"
ASKS = "    mesh = model.head.weight.device_mesh\n    assert mesh.size() == world\n"


RIGHT = pytest.param(("x", "x"), "pass", marks=pytest.mark.full)


@cases("edit, status", RIGHT, (("loss.backward()", "(loss * world).backward()"), "fail"))
def test_one_process_decides_alone(
    verify_script, tmp_path: Path, edit: tuple[str, str], status: str
) -> None:
    verdict = verify_script(edited(tmp_path, (AFTER, ASKS + AFTER), edit), only=ONLY)
    found = {f.rule: f for f in verdict.findings}
    assert found["matches-ddp"].status == "inconclusive"
    assert "`mesh = model.head.weight.device_mesh`" in found["matches-ddp"].evidence
    assert found["matches-single-process"].status == status, found[
        "matches-single-process"
    ].evidence
    assert [r["role"] for r in verdict.runs] == ["train", "reference", "perturbed", "single"]
    assert [r["world_size"] for r in verdict.runs] == [2, 2, 1, 1]
    if status == "fail":
        one = found["matches-single-process"]
        assert one.measured == pytest.approx(1.0, abs=0.01)  # the loss is twice as large
        assert 2.0**-18 <= one.limit < 1e-2


@pytest.mark.full
@cases("change, status", RIGHT, (("lr=", "lr=2 * "), "fail"))
def test_a_script_for_one_process_is_an_oracle_too(
    verify_script, tmp_path: Path, change: tuple[str, str], status: str
) -> None:
    """Its model was never distributed: it runs on one rank, with the whole global batch."""
    text = (ZOO / "minimal.py").read_text(encoding="utf-8")
    plain = (
        text.replace('    dist.init_process_group("gloo")\n', "")
        .replace("dist.get_rank(), dist.get_world_size()", "0, 1")
        .replace("    dist.destroy_process_group()\n", "")
    )
    plain = re.sub(r".*(fully_shard|init_device_mesh|import torch.distributed).*\n", "", plain)
    plain = re.sub(r"    for block in model.blocks:\n", "", plain)
    assert "dist" not in plain
    before = written(tmp_path, plain.replace(*change, 1), "before.py")
    (found,) = verify_script(
        written(tmp_path, text), only=("matches-original",), reference=str(before)
    ).findings
    assert found.status == status, found.evidence


SUMMED = """\
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
"""
EMPTY, BACKWARD = "    model.to_empty", "        loss.backward()"
SCALE, DDP = "double-or-missing-world-scale", "matches-ddp"


@cases("scale, status", ("(loss / world)", "pass"), ("loss", "fail"))
def test_a_divide_factor_that_is_set_before_to_empty(
    verify_script, tmp_path: Path, scale: str, status: str
) -> None:
    changes = (EMPTY, SUMMED + EMPTY), (BACKWARD, f"        {scale}.backward()")
    verdict = verify_script(edited(tmp_path, *changes, of="meta_init_rope"), only=(DDP, SCALE))
    assert {f.rule: f.status for f in verdict.findings} == {DDP: "pass", SCALE: status}


WHOLE = 'F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count'
CHUNKS = (
    "sum(F.cross_entropy(a[k], b[k], reduction='sum') for a, b in [(model(x).chunk(4, 1),"
    " y.chunk(4, 1))] for k in range(4))"
)
CHUNKS = CHUNKS.replace("a[k]", "a[k].flatten(0, 1)[b[k].flatten() != -100]").replace(
    "b[k],", "b[k].flatten()[b[k].flatten() != -100],"
)


@cases("by, status", ("count", "pass"), ("count * world", "fail"))
def test_a_loss_in_chunks_is_one_mean(verify_script, tmp_path: Path, by: str, status: str) -> None:
    """As torchtune's LinearCrossEntropyLoss computes it."""
    mean = "gradient-of-mean-loss"
    script = edited(tmp_path, (WHOLE, f"{CHUNKS} / ({by})"), of="sum_reduction")
    verdict = verify_script(script, only=(mean, "token-mean-of-means"))
    assert {f.rule: f.status for f in verdict.findings} == {
        mean: status,
        "token-mean-of-means": "pass",
    }


FINALIZED = """\
        model.set_requires_gradient_sync(False)
        for part in batch.chunk(2):
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / 2
            loss.backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward(async_op=True).wait()
        optimizer.step()
"""
WHOLE_BATCH = """\
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
"""


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="it came with torch 2.15")
def test_backwards_that_the_script_finalizes(verify_script, tmp_path: Path) -> None:
    first = "    for step in range"
    changes = (
        (first, f"    model.set_manual_backward_finalization(True)\n{first}"),
        (WHOLE_BATCH, FINALIZED),
    )
    verdict = verify_script(edited(tmp_path, *changes, of="meta_init_rope"), only=(DDP, SCALE))
    found = {f.rule: f for f in verdict.findings}
    assert {rule: f.status for rule, f in found.items()} == {DDP: "pass", SCALE: "pass"}, found[
        DDP
    ].evidence
    assert "one process" not in found[DDP].evidence
