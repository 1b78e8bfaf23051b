"""An export that computes in the memory of the weights, and what the survey run records of it."""

from typing import Any

import torch
from torch import nn

from records import cases, judge, micro, model, run, sources, step, stepped
from verified_fsdp2.verifier.probe.events.survey import Weights

RULE = "same-model-throughout"
FILE = "train.py"
LOOP = "def train():\n    loss.backward()\n    optimizer.step()\n    export(model)\n"


def judged(body: str, between: dict[int, list[str]], total: int = 12) -> Any:
    """The finding where an export with this body ran, and weights changed before these steps."""
    text = f"{LOOP}def export(model):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    lines = {FILE: list(range(1, text.count("\n") + 1))}
    begun = {"kind": "reached", "steps": 0, "lines": lines, "stack": []}
    begun["stack"] = [{"file": FILE, "line": 3, "function": "train", "code": ""}]
    made = [
        {"kind": "reached", "steps": number, "between": between.get(number, [])}
        for number in range(1, total + 1)
    ]
    survey = run([begun, *made], role="survey")
    rank = [model(), micro(), step(), stepped()]
    return judge(RULE, rank, rank, survey=survey, **sources(text))


IN_PLACE = "w = model.words.weight\nw.div_(w.norm())\nsave(w.full_tensor(), 'x.pt')"


@cases(
    "body, status",
    (IN_PLACE, "fail"),
    (
        "for p in model.parameters():\n    p.data.mul_(2)\ntorch.save(model.state_dict(), 'x')",
        "fail",
    ),
    ("w = model.w.detach()\nw /= w.norm()\nsave(w)", "fail"),
    # a copy, or what a computation has given
    ("w = model.w.clone()\nw.div_(w.norm())\nsave(w)", "pass"),
    ("w = model.w * 2\nw.div_(w.norm())\nsave(w)", "pass"),
    ("total = 0\ntotal += 1\nsave(total)", "pass"),
    # weights that are shrunk on purpose after they were written, or put back
    ("save(model)\nmodel.w.mul_(0.5)", "pass"),
    ("model.w.copy_(average)\nsave(model)", "pass"),
    ("model.w.mul_(0.5)", "pass"),
)
def test_where_an_export_computes(body: str, status: str) -> None:
    found = judged(body, {7: ["words.weight"]})
    assert found.status == status, found.evidence
    if status == "fail":
        assert "before step 7 1 parameter (words.weight) had other values" in found.evidence
        assert found.location is not None and found.location.function == "export"


@cases(
    "between, status",
    ({}, "pass"),
    ({7: ["w"]}, "fail"),
    # a projection after each update, or after many
    ({number: ["w"] for number in range(2, 13)}, "pass"),
    ({number: ["w"] for number in range(2, 13, 2)}, "pass"),
)
def test_how_often_weights_change(between: dict[int, list[str]], status: str) -> None:
    assert judged(IN_PLACE, between).status == status


def test_what_changes_between_steps() -> None:
    layer, weights = nn.Linear(3, 2), Weights()
    weights._params = lambda: list(layer.named_parameters())  # type: ignore[method-assign]
    weights.stepping()
    weights.stepped()
    weights.stepping()
    assert weights.between == set()
    with torch.no_grad():
        kept = layer.weight.clone()
        layer.weight.mul_(2)
        layer.weight.copy_(kept)  # put back
        layer.bias.add_(1)
    weights.stepping()
    assert weights.between == {"bias"}
