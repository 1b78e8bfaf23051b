"""A copy of the weights that ranks keep as their parts, and that is not that of one process."""

from typing import Any

from test_laws import held, state, steps, tensor

from records import cases, model, parameter, run
from verified_fsdp2.verifier.analysis.copies_of_weights import copy_apart


def rank(numel: int, size: float, holder: str = "object") -> list[dict[str, Any]]:
    """A copy that is other from step 2 on."""
    first, then = ({**tensor(one * numel**0.5, holder), "numel": numel} for one in (1.0, size))
    return [
        model(parameter(numel=64)),
        *steps(),
        state(1, main__ema=first),
        state(2, main__ema=then),
        state(3, main__best=held(1.0)),
    ]


@cases(
    "size, parts, holder, step, named",
    (1.0, 32, "object", 3, False),
    (1.1, 32, "object", 3, True),
    (1.1, 32, "object", 1, False),  # after the evaluation
    (1.1, 16, "object", 3, False),  # no parts of a parameter
    (1.1, 32, "optimizer", 3, False),
)
def test_a_copy_is_named(size: float, parts: int, holder: str, step: int, named: bool) -> None:
    ranks = run(*[rank(parts, size, holder)] * 2)
    found = copy_apart(ranks, run(rank(64, 1.0, holder), role="single"), step)
    text = "`main.ema`, parts of a copy of them, differs from step 2 on"
    assert found == (text if named else "")
