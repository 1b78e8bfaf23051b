"""Shapes of right scripts that were met in public trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus import TESTS

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


def test_a_loss_with_the_head_of_a_model_that_trains_in_eval_mode(verify_script, tmp_path: Path) -> None:
    text = (TESTS / "zoo" / "minimal.py").read_text(encoding="utf-8")
    for old, new in EDITS:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    verdict = verify_script(tmp_path / "train.py", only=RULES)
    found = {f.rule: f.status for f in verdict.findings}
    assert found == dict.fromkeys(RULES, "pass"), [f.evidence for f in verdict.findings]
