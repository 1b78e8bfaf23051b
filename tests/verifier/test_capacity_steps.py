"""Steps of a capacity run where no optimizer of torch makes them."""

from pathlib import Path

import pytest
from test_capacity import PARAMETERS, ROWS, SCRIPT, VOCABULARY, WIDTH, record, tried

from verified_fsdp2.verifier.analysis.capacity import judge
from verified_fsdp2.verifier.launch.client import Launcher

BY_GRADIENTS = """    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=1e-3)
            param.grad = None
"""
BY_TRIALS = """    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=1e-3 * float(loss))
"""


@pytest.mark.parametrize("update", [BY_GRADIENTS, BY_TRIALS])
def test_step_is_what_a_script_without_optimizer_updates(
    launcher: Launcher, tmp_path: Path, update: str
) -> None:
    old = "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    assert old in SCRIPT
    text = SCRIPT.replace(old, update)
    if update is BY_TRIALS:
        text = text.replace(
            "    logits = model(tokens)\n",
            "    with torch.no_grad():\n        logits = model(tokens)\n",
        )
    run = tried(launcher, tmp_path, text)
    assert (judge(run, None).trouble, judge(run, None).exit_code) == (None, 0)
    found = record(run)
    assert found.steps == 3
    assert sum(one.forward for one in found.flops.values()) == 2 * ROWS * (
        PARAMETERS - VOCABULARY * WIDTH
    )
    assert {one.phase for one in found.peaks} == {"initialisation", "first step", "later steps"}


def test_evaluation_alone_is_no_step(launcher: Launcher, tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "for step in range(20):", "torch.set_grad_enabled(False)\nfor step in range(20):"
    ).replace("    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n", "")
    found = judge(tried(launcher, tmp_path, text), None)
    assert found.trouble is not None and found.trouble.text == "no model was trained"
    assert found.exit_code == 4
