"""A finding stands where the code is that has to change, also in another file than the training
loop.
"""

from pathlib import Path

import pytest

from scripts import FAULTS, Verify, edited, written

SCALE = """
import torch

def scaled(parameters, factor):
    for parameter in parameters:
        {how}
"""


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"


@pytest.mark.parametrize(
    "how, then",
    [
        ("parameter.grad *= factor", ""),
        ("parameter.grad._local_tensor.mul_(factor)", ""),
        ("parameter.grad.mul_(factor)", CLIP),
        ("torch._foreach_mul_([parameter.grad], torch.tensor(float(factor)))", CLIP),
        ("parameter.grad = parameter.grad * factor", ""),
    ],
)
def test_gradients_scaled_in_another_file(
    verify_script: Verify, tmp_path: Path, how: str, then: str
) -> None:
    written(tmp_path, SCALE.format(how=how), "scaling.py")
    lines = ["scaled(model.parameters(), world)", *([then] if then else []), "optimizer.step()"]
    steps = ("        optimizer.step()", "".join(f"        {line}\n" for line in lines))
    script = edited(
        tmp_path, ("import torch\n", "import torch\nfrom scaling import scaled\n"), steps
    )
    (finding,) = verify_script(script, ("double-or-missing-world-scale",), steps=3).findings
    assert finding.status == "fail", finding.evidence
    assert finding.location is not None
    assert (Path(finding.location.file).name, finding.location.function) == ("scaling.py", "scaled")
    assert [line.code for line in finding.location.callers] == ["scaled(model.parameters(), world)"]


def test_a_profile_function_of_the_script_is_left_alone(
    verify_script: Verify, tmp_path: Path
) -> None:
    """Nothing is looked at then: the finding stands at the step."""
    written(tmp_path, SCALE.format(how="parameter.grad.mul_(factor)"), "scaling.py")
    lines = [
        "scaled(model.parameters(), world)",
        "assert sys.getprofile() is own",
        "optimizer.step()",
    ]
    steps = ("        optimizer.step()", "".join(f"        {line}\n" for line in lines))
    own = ("def main():", "def own(*event):\n    pass\n\n\ndef main():\n    sys.setprofile(own)")
    names = ("import torch\n", "import sys\n\nimport torch\nfrom scaling import scaled\n")
    verdict = verify_script(
        edited(tmp_path, names, own, steps), ("double-or-missing-world-scale",), steps=3
    )
    (finding,) = verdict.findings
    assert finding.location is not None
    assert (finding.status, finding.location.code) == ("fail", "optimizer.step()")
    assert [(run["role"], run["completed"]) for run in verdict.runs if run["role"] == "scaled"] == [
        ("scaled", True)
    ]


@pytest.mark.parametrize(
    "fault, code",
    [
        ("meta_buffers_garbage", 'self.register_buffer("inv_freq"'),
        ("meta_params_not_reset", "self.gate = nn.Parameter("),
    ],
)
def test_what_nothing_fills_stands_in_its_class(
    verify_script: Verify, fault: str, code: str
) -> None:
    verdict = verify_script(FAULTS / f"{fault}.py", (fault.replace("_", "-"),), steps=2)
    (finding,) = (one for one in verdict.findings if one.status == "fail")
    assert "allocated by to_empty (line " in finding.evidence
    assert finding.location is not None
    assert finding.location.code.startswith(code)
