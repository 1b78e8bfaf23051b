"""From a spec to a verdict: the quickstart passes with the numbers that the project promises, and
its mutants are found.
"""

from pathlib import Path

import pytest

from verdicts import valid
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.report import RENDERERS
from verified_fsdp2.verifier.verdict import Verdict

ROOT = Path(__file__).parents[1]


def write(folder: Path, *settings: str) -> Path:
    scaffold.write(
        scaffold.render(spec.load(ROOT / "examples" / "quickstart.yaml", settings)), folder
    )
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
    return verify_with(
        launcher, resolve(folder, {}), tmp_path_factory.mktemp("work"), select((), ())
    )


def test_it_passes(passing: Verdict) -> None:
    found = [
        (f.rule, f.status, f.evidence)
        for f in passing.findings
        if f.status not in ("pass", "not_covered", "not_applicable")
    ]
    assert (found, passing.verdict) == ([], "pass")
    valid("json", RENDERERS["json"](passing))
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


EMPTY, FILLED = (
    "    model.to_empty(device=device)\n",
    "    init_weights(model, seed)\n    return model",
)
BUILT = "        model = Decoder(config)\n"
EARLY = f"{EMPTY}    early = torch.optim.AdamW(model.parameters(), lr=0.002)\n"
LOADED = 'state.step, state.samples = saved["step"], saved["samples"]'
LOCAL_NORM = """\
    grads = [p.grad.to_local() for p in state.model.parameters()]
    norm = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
"""
# rule: (file, old, new) of each edit, and how the line of the finding begins
MUTANTS: dict[str, tuple[list[tuple[str, str, str]], str]] = {
    "optim-before-shard": (
        [
            ("model.py", EMPTY, ""),
            ("model.py", BUILT, BUILT + EARLY),
            ("model.py", f"{FILLED}\n", f"{FILLED}, early\n"),
            ("train.py", "    optimizer = build_optimizer(model, args)\n", ""),
            ("train.py", "    model = build_model(", "    model, optimizer = build_model("),
        ],
        "early = torch.optim.AdamW(",
    ),
    "manual-local-norm-clip": (
        [
            (
                "train.py",
                "    norm = nn.utils.clip_grad_norm_(state.model.parameters(), max_norm)\n",
                LOCAL_NORM,
            )
        ],
        "",
    ),
    "scheduler-or-progress-not-restored": (
        [
            ("checkpoint.py", '            "samples": self.samples,\n', ""),
            ("checkpoint.py", LOADED, 'state.step = saved["step"]'),
        ],
        "",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("rule", MUTANTS)
def test_a_mutant_is_found(verify_script, tmp_path: Path, rule: str) -> None:
    folder, (edits, code) = write(tmp_path / "project"), MUTANTS[rule]
    lines = [change(folder / file, old, new) for file, old, new in edits]
    (finding,) = verify_script(folder, only=(rule,)).findings
    assert finding.status == "fail" and finding.location is not None
    assert finding.location.code.startswith(code)
    if not code:
        assert Path(finding.location.file).name == edits[0][0]
    if rule == "manual-local-norm-clip":
        assert lines[0] <= finding.location.line <= lines[0] + 3


@pytest.mark.full
def test_a_save_that_a_process_writes_can_be_interrupted(verify_script, tmp_path: Path) -> None:
    folder = write(tmp_path / "project", "checkpoint.mode=process")
    (finding,) = verify_script(folder, only=("incomplete-checkpoint-chosen",)).findings
    assert (finding.status, "rank 1" in finding.evidence) == ("pass", True)
