"""The module in which a script first computes otherwise than with DDP."""

from typing import Any

import pytest

from records import cases, run
from scripts import Verify, edited
from verified_fsdp2.verifier.analysis.layers import first_layer
from verified_fsdp2.verifier.evidence import Evidence

SHAPE = "batch, seq, _ = x.shape"


def layer(name: str, made: float, given: float | None = 1.0) -> dict[str, Any]:
    def sketch(size: float | None) -> list[float] | None:
        return None if size is None else [size * size, size, 0.0, 0.0, 0.0]

    return {
        "kind": "layer",
        "name": name,
        "cls": "Block",
        "given": sketch(given),
        "made": sketch(made),
    }


ORACLE = [layer("a", 1.0), layer("b", 2.0, 1.0)]


@cases(
    "layers, name, how",
    ([layer("a", 1.0), layer("b", 2.0)], "", ""),
    ([layer("a", 1.0), layer("b", 2.1)], "b", "from equal inputs"),
    ([layer("a", 1.0), layer("b", 2.1, 1.5)], "b", "its inputs are not, either"),
    ([layer("a", 1.0), layer("b", 2.1, None)], "b", "of DDP"),
    ([layer("c", 9.0), layer("b", 2.0)], "", ""),  # of another name: there is nothing to compare
    ([layer("a", 1.00001), layer("b", 2.0)], "", ""),  # rounding
)
def test_the_first_output_that_differs(layers: list[dict[str, Any]], name: str, how: str) -> None:
    found = first_layer(Evidence(layers=run(layers), layers_reference=run(ORACLE)))
    text = found[0] if found else ""
    assert text.startswith(f"`{name}` (Block)" if name else "") and text.endswith(how)
    assert bool(text) is bool(name)
    assert first_layer(Evidence(layers=run(layers))) is None


@pytest.mark.launch
def test_a_finding_stands_at_the_forward_of_that_module(
    verify_script: Verify, tmp_path: Any
) -> None:
    """A start that depends on the data writes into gathered parameters, which are freed again."""
    once = (
        'if not hasattr(self, "begun"):',
        "    self.begun = True",
        "    with torch.no_grad():",
        "        self.norm1.weight.mul_(3.0)",
    )
    begins = "".join(f"{line}\n        " for line in once)
    start = "with torch.no_grad():\n        model(tokens[:4, :-1])\n    "
    loop = "for step in range(STEPS):"
    script = edited(tmp_path, (SHAPE, begins + SHAPE), (loop, start + loop))
    verdict = verify_script(script, ("matches-ddp",))
    (found,) = verdict.findings
    assert found.status == "fail" and found.location is not None
    assert (
        "`blocks.0.norm1` (LayerNorm) is the first module whose output is not that of DDP, from"
        " equal inputs" in found.evidence
    )
    assert (found.location.function, found.location.code) == (
        "forward",
        "def forward(self, x):",
    )  # of the Block around it
    assert {"layers", "layers_reference"} <= {one["role"] for one in verdict.runs}
