"""Shapes of right scripts that were met in public trainers."""

from pathlib import Path

import pytest

from records import cases
from scripts import Verify, edited, training, written
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.pipeline import verify

pytestmark = pytest.mark.launch

LOSS = '''class ChunkedLoss(nn.Module):
    """Applies the model's head itself."""

    def __init__(self, model):
        super().__init__()
        self.head = model.head

    def forward(self, hidden, targets):
        return sum(F.cross_entropy(self.head(h).flatten(0, 1), t.flatten()) for h, t in zip(hidden, targets)) / len(hidden)


def make_sequences('''
EDITS = (
    ("def make_sequences(", LOSS),
    ("return self.head(self.norm(x))", "return self.norm(x)"),
    ("    fully_shard(model, mesh=mesh)\n", "    fully_shard(model.head, mesh=mesh)\n    fully_shard(model, mesh=mesh)\n"),
    ("    tokens = make", "    loss_of = ChunkedLoss(model)\n    model.eval()\n    tokens = make"),
    ("logits = model(batch[:, :-1])", "hidden = model(batch[:, :-1]).chunk(2)"),
    ("F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())", "loss_of(hidden, batch[:, 1:].chunk(2))"),
)  # fmt: skip
RULES = ("root-not-wrapped", "same-data-on-every-rank", "matches-ddp", "matches-single-process")
BUILT = "    optimizer = torch.optim.AdamW("
DRAWN = (
    "    with torch.no_grad():\n        nn.init.trunc_normal_(model.head.weight, 0.0, 0.02, -0.04,"
    f" 0.04)\n{BUILT}"
)


@cases(
    "edits, rules",
    (EDITS, RULES),  # the loss has the model's head, and the model trains in eval mode
    (
        ((BUILT, DRAWN),),
        ("grad-norm-item-partial",),
    ),  # torch reads a norm: each rank draws until its part is in bounds
    ids=["loss", "trunc_normal_"],
)
def test_it_passes(
    verify_script: Verify,
    tmp_path: Path,
    edits: tuple[tuple[str, str], ...],
    rules: tuple[str, ...],
) -> None:
    findings = verify_script(edited(tmp_path, *edits), only=rules).findings
    assert {f.rule: f.status for f in findings} == dict.fromkeys(rules, "pass"), [
        f.evidence for f in findings
    ]


OPTION = (
    'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--batch-size",'
    " type=int, default=8)\n"
)
READ = f"\n{OPTION}BATCH_PER_RANK = parser.parse_args().batch_size\n\n\n@dataclass"
BATCH = ("BATCH_PER_RANK, SAMPLES, STEPS = 16, 8, 512, 20", "SAMPLES, STEPS = 16, 512, 20")


@cases("edits, status", ((BATCH, ("\n@dataclass", READ)), "pass"), ((), "inconclusive"))
def test_a_batch_per_rank(tmp_path: Path, edits: tuple[tuple[str, str], ...], status: str) -> None:
    """One process takes the batch of all ranks, by the script's own option."""
    script = edited(tmp_path, *edits, of="per_rank_batch")
    verdict = verify(resolve(script, {"steps": "3"}), tmp_path / "work", ["matches-single-process"])
    assert [finding.status for finding in verdict.findings] == [status], verdict.findings
    assert any("--batch-size 16" in note for note in verdict.environment["notes"]) is bool(edits)


GROWS = training(
    """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.used = nn.ModuleList([nn.Linear(8, 8)]), None

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        keep = torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(step)) < 0.9
        with torch.no_grad():
            self.used = x.abs().mean(0)  # of the samples of this rank and call
        return x * keep
""",
    "Noisy()",
    "torch.randn(8, 8,"
    " generator=torch.Generator().manual_seed(step)).chunk(dist.get_world_size())[dist.get_rank()]",
    within="""
if step == 2:
    model.layers.append(fully_shard(nn.Linear(8, 8)))
    optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
if step == 3:  # an update is skipped
    model(torch.ones(4, 8)).sum().backward()
    optimizer.zero_grad()
""",
)


def test_noise_results_of_calls_growth_and_skipped_updates(
    verify_script: Verify, tmp_path: Path
) -> None:
    rules = ("matches-ddp", "matches-single-process", "state-same-on-ranks")
    verdict = verify_script(written(tmp_path, GROWS), only=rules, steps=6)
    assert {
        finding.rule: finding.status for finding in verdict.findings if finding.rule in rules
    } == dict.fromkeys(rules, "pass")


CURVES = """
def curves(groups):
    made = []
    for depth in range(groups):
        made.append(lambda step: 0.8**depth)
    return made
"""
USES = "    optimizer = torch.optim.AdamW("


@cases("uses, warns", ("import curves", True), ("import curves; curves.curves(2)", False))
def test_a_fault_of_a_module_counts_where_a_run_reaches_it(
    uses: str, warns: bool, verify_script: Verify, tmp_path: Path
) -> None:
    written(tmp_path, CURVES, "curves.py")
    script = edited(tmp_path, (USES, f"    {uses}\n{USES}"))
    (found,) = verify_script(script, only=("loop-variable-read-late",)).findings
    assert (found.status, found.warns, Path(found.location.file).name) == (
        "fail",
        warns,
        "curves.py",
    )
