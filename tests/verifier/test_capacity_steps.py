"""Steps of a capacity run: where no optimizer of torch makes them, and parts of one."""

from pathlib import Path

import pytest
from test_capacity import PARAMETERS, ROWS, SCRIPT, VOCABULARY, WIDTH, record, tried

from verified_fsdp2.skill.capacity.target import least_time
from verified_fsdp2.verifier.analysis.capacity import judge
from verified_fsdp2.verifier.config.devices import device
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.report.capacity import outcome

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


@pytest.mark.parametrize(
    ("line", "code"),
    [("break", 4), ("open('more.bin')", 4), ("raise ValueError('no')", 1)],
)
def test_part_of_a_step_shows_neither_that_it_fits_nor_a_speed(
    launcher: Launcher, tmp_path: Path, line: str, code: int
) -> None:
    """The optimizer's state is still to come."""
    text = SCRIPT.replace("    optimizer.step()\n", f"    {line}\n")
    run = tried(launcher, tmp_path, text)
    found = judge(run, 80 << 30)
    assert found.trouble is not None and found.record is not None and found.highest is not None
    assert (found.record.steps, found.record.flops) == (0, {})
    assert (found.fits, found.tight, found.exit_code) == (None, False, code)
    assert "fits" not in outcome(found) and "no whole step was seen" in outcome(found)
    assert least_time(found.record, device("h100"), None, 64) is None
    assert judge(run, 1 << 30).fits is False  # less than a part needs


def test_one_step_is_a_whole_one(launcher: Launcher, tmp_path: Path) -> None:
    text = SCRIPT.replace("range(20)", "range(1)")
    found = judge(tried(launcher, tmp_path, text), 80 << 30)
    assert (found.trouble, found.fits, found.exit_code) == (None, True, 0)
    assert least_time(found.record, device("h100"), None, 64) is not None


def test_an_error_later_leaves_the_figures_of_whole_steps(
    launcher: Launcher, tmp_path: Path
) -> None:
    text = SCRIPT.replace("    loss.backward()\n", "    open('x') if step else loss.backward()\n")
    found = judge(tried(launcher, tmp_path, text), 80 << 30)
    assert found.record is not None and found.record.steps == 1 and found.exit_code == 4
    forward = 2 * ROWS * (PARAMETERS - VOCABULARY * WIDTH)
    assert sum(one.backward for one in found.record.flops.values()) == 2 * forward
