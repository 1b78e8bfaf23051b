"""What the runs of one verification say together."""

import records
from verified_fsdp2.verifier.evidence import Evidence


@records.cases(
    "saves, resumed",
    ([("save", 2), ("save", 4), ("save", 5)], 2),  # the last one with three steps after it
    ([("save", 3), ("save", 4), ("save", 5)], 4),  # none has: the last one before the last step
    ([("torch.save", 3)], 3),
    ([("save", 3), ("torch.save", 4)], 3),  # an export is no checkpoint beside dcp
    ([("save", 5)], None),
)
def test_the_save_that_is_resumed(saves: list[tuple[str, int]], resumed: int | None) -> None:
    rows = [record for number in range(1, 6) for record in (records.step(number), records.stepped(number))]
    rows += [{"kind": "checkpoint", "op": op, "after_step": after} for op, after in saves]
    assert Evidence(train=records.run(rows)).saved_after() == resumed
    assert Evidence(train=None).saved_after() is None
