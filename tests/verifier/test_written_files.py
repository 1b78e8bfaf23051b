"""Exports without tensors: what the rule makes of the files that the ranks have written."""

from typing import Any

from records import LINE, judge, judged_as, row, steps

RULE = "export-without-tensors"
OTHER = {**LINE.to_json(), "line": 7}


def written(tensors: int = 0, values: int | None = None, to: str = "/a.pt", **more: Any) -> Any:
    base = {"kind": "written_file", "to": to, "after_step": 1, "tensors": tensors}
    return {**base, "values": tensors if values is None else values, **more}


DCP = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "/c"}

test_an_export_without_tensors = judged_as(
    row(RULE, "fail", [*steps(), written()], steps(), at=LINE, names=("a.pt", "step 1")),
    row(RULE, "pass", [*steps(), written(3)], steps()),
    row(RULE, "not_applicable", steps(), steps()),
    # numbers of a training, such as a history
    row(RULE, "pass", [*steps(), written(values=2)], steps()),
    # made before the training, to be filled
    row(RULE, "pass", [*steps(), written(after_step=0)], steps()),
    # what get_model_state_dict gives to the other ranks
    row(RULE, "pass", [*steps(), written(3)], [*steps(), written(to="/b.pt")]),
    row(RULE, "pass", [*steps(), written(3)], [*steps(), written(at_line=OTHER)]),
)


def test_beside_other_tensors_it_warns() -> None:
    for more in (written(3, to="/b.pt", at_line=OTHER), DCP):
        found = judge(RULE, [*steps(), written(), more], steps())
        assert (found.status, found.required) == ("fail", False)
    assert judge(RULE, [*steps(), written()], steps()).required
