"""What the runs of one verification say together."""

from typing import Any

import records
from verified_fsdp2.verifier.evidence import Evidence


def saved(op: str, after_step: int) -> dict[str, Any]:
    return {"kind": "checkpoint", "op": op, "after_step": after_step}


def train_with(*saves: dict[str, Any]) -> Evidence:
    steps = [record for number in range(1, 6) for record in (records.step(number), records.stepped(number))]
    return Evidence(train=records.run([*steps, *saves]))


def test_the_last_save_before_the_last_step_is_resumed() -> None:
    assert train_with(saved("save", 2), saved("save", 4), saved("save", 5)).saved_after() == 4
    assert train_with(saved("torch.save", 3)).saved_after() == 3


def test_an_export_is_no_checkpoint_beside_dcp() -> None:
    assert train_with(saved("save", 3), saved("torch.save", 4)).saved_after() == 3


def test_no_usable_save() -> None:
    assert train_with(saved("save", 5)).saved_after() is None
    assert Evidence(train=None).saved_after() is None
