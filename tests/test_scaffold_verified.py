"""From a spec to a verdict: the quickstart passes with the numbers that the project promises, and its mutants are found."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.report import RENDERERS
from verified_fsdp2.verifier.verdict import Verdict

pytestmark = pytest.mark.launch
ROOT = Path(__file__).parents[1]


def write(folder: Path, *settings: str) -> Path:
    scaffold.write(scaffold.render(spec.load(ROOT / "examples" / "quickstart.yaml", settings)), folder)
    return folder


def change(file: Path, old: str, new: str) -> int:
    """Replace the one place of `old`; returns its line."""
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file.name}"
    file.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


@pytest.fixture(scope="module")
def passing(launcher, tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    folder = write(tmp_path_factory.mktemp("scaffold") / "project")
    return verify_with(launcher, resolve(folder, {}), tmp_path_factory.mktemp("work"), select((), ()))


def test_it_passes(passing: Verdict) -> None:
    assert [
        (f.rule, f.status, f.evidence) for f in passing.findings if f.status not in ("pass", "not_applicable")
    ] == []
    assert passing.verdict == "pass"


def test_its_report_is_valid(passing: Verdict) -> None:
    schema = json.loads((ROOT / "verifier" / "report" / "report.schema.json").read_text())
    jsonschema.validate(json.loads(RENDERERS["json"](passing)), schema)
    assert RENDERERS["text"](passing).rstrip().endswith("verdict: pass")


def test_losses_agree_at_1_2_and_4_ranks(passing: Verdict) -> None:
    runs = {(run["role"], run["world_size"]): run["losses"] for run in passing.runs}
    base = runs["train", 2]
    assert len(base) == 5
    for key in (("reference", 2), ("single", 1)):
        assert runs[key] == pytest.approx(base, rel=1e-5)
    assert runs["resume", 2] == base[3:]
    for key in (("reshard", 1), ("reshard", 4)):
        assert runs[key] == pytest.approx(base[3:], rel=1e-6)


def test_what_was_seen_of_the_model(passing: Verdict) -> None:
    facts = passing.facts
    assert facts["sharded"] == facts["parameters"]
    assert facts["largest_share"] == pytest.approx(0.5, abs=0.01)
    assert facts["saved_after_step"] == 3


@pytest.mark.full
def test_an_optimizer_above_fully_shard_is_found(verify_script, tmp_path: Path) -> None:
    folder = write(tmp_path / "project")
    model, train = folder / "model.py", folder / "train.py"
    built = "        model = Decoder(config)\n"
    early = "    model.to_empty(device=device)\n    early = torch.optim.AdamW(model.parameters(), lr=0.002)\n"
    change(model, "    model.to_empty(device=device)\n", "")
    change(model, built, built + early)
    change(
        model,
        "    init_weights(model, seed)\n    return model\n",
        "    init_weights(model, seed)\n    return model, early\n",
    )
    change(train, "    optimizer = build_optimizer(model)\n", "")
    change(train, "    model = build_model(", "    model, optimizer = build_model(")
    (finding,) = verify_script(folder, only=("optim-before-shard",)).findings
    assert finding.status == "fail"
    assert finding.location is not None
    assert finding.location.code.startswith("early = torch.optim.AdamW(")


@pytest.mark.full
def test_a_local_clip_is_found(verify_script, tmp_path: Path) -> None:
    folder = write(tmp_path / "project")
    old = "    norm = nn.utils.clip_grad_norm_(state.model.parameters(), MAX_NORM)\n"
    new = (
        "    grads = [p.grad.to_local() for p in state.model.parameters()]\n"
        "    norm = torch.stack([g.norm() for g in grads]).norm()\n"
        "    for g in grads:\n"
        "        g.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))\n"
    )
    line = change(folder / "train.py", old, new)
    (finding,) = verify_script(
        folder / "train.py", only=("manual-local-norm-clip",), args="--out {checkpoint}"
    ).findings
    assert finding.status == "fail"
    assert finding.location is not None
    assert line <= finding.location.line <= line + 3


@pytest.mark.full
def test_a_lost_data_position_is_found(verify_script, tmp_path: Path) -> None:
    folder = write(tmp_path / "project")
    change(folder / "checkpoint.py", '            "samples": self.samples,\n', "")
    change(
        folder / "checkpoint.py",
        'state.step, state.samples = saved["step"], saved["samples"]',
        'state.step = saved["step"]',
    )
    (finding,) = verify_script(folder, only=("scheduler-or-progress-not-restored",)).findings
    assert finding.status == "fail"
    assert finding.location is not None
    assert finding.location.file.endswith("checkpoint.py")


@pytest.mark.full
def test_a_save_that_a_process_writes_can_be_interrupted(verify_script, tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "checkpoint.mode=process")
    (finding,) = verify_script(folder, only=("incomplete-checkpoint-chosen",)).findings
    assert (finding.status, "rank 1" in finding.evidence) == ("pass", True)
