"""Collectives to which ranks bring other sizes: what each rank keeps of its calls, and shows."""

from pathlib import Path
from typing import Any

import pytest

from records import trace
from verified_fsdp2.verifier.analysis.collective_sizes import sizes_apart
from verified_fsdp2.verifier.evidence import Sources
from verified_fsdp2.verifier.source.sources import with_named_files
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import CollectiveCall

SOURCE = """
def forward(x):
    slots = counted(x)
    queue = x.new_zeros(slots, 8)
    dist.all_to_all_single(torch.empty_like(queue), queue)
"""
LINE = 5


def call(number: int, _: int, gives: int, op: str = "all_to_all_single", **values: Any) -> Any:
    frames = [("/p/train.py", LINE, "forward")]
    sizes = {"gives": [gives] * 2, "takes": [gives] * 2}
    return CollectiveCall(
        op=op, order=number, ranks=[0, 1], number=number, frames=frames, values=[values], **sizes
    )


def stopped(first: list[CollectiveCall], second: list[CollectiveCall], **more: Any) -> Run:
    traces = (trace(0, ()), trace(1, ()))
    return Run("train", 2, traces, timed_out=True, calls={0: first, 1: second}, **more)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([call(1, 0, 8), call(2, 0, 48, slots=6)], [call(1, 1, 8), call(2, 1, 40, slots=5)], "6"),
        # the smaller one has gone on to the next call before the other is ended
        ([call(7, 0, 48, slots=6)], [call(7, 1, 40, slots=5), call(8, 1, 8)], "6"),
        ([call(1, 0, 8)], [call(1, 1, 8), call(2, 1, 40)], ""),  # rank 0 did not come: no size
        ([call(1, 0, 8)], [call(1, 1, 8, op="all_reduce")], ""),  # other collectives
        ([call(1, 0, 48, rank=0)], [call(1, 1, 40, rank=1)], "48"),
    ],
)
def test_the_first_call_whose_sizes_do_not_fit(first: Any, second: Any, words: str) -> None:
    found = sizes_apart(stopped(first, second))
    assert (found is not None) == bool(words)
    if found is not None:
        assert words in found.text() and "`rank`" not in found.text()
        assert f"at train.py:{LINE} rank 0 gives 48 elements, where rank 1 takes 40" in found.text()


def test_parts_of_other_sizes_by_agreement() -> None:
    """Split sizes that fit are no fault, however different they are."""
    one, other = call(1, 0, 0), call(1, 1, 0)
    one.gives[:], one.takes[:] = [1, 5], [1, 2]
    other.gives[:], other.takes[:] = [2, 3], [5, 3]
    assert sizes_apart(stopped([one], [other])) is None
    other.takes[0] = 4
    found = sizes_apart(stopped([one], [other]))
    assert found is not None and (found.gives, found.takes) == (5, 4)


def test_the_line_to_edit_is_where_the_number_is_set(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    calls = [call(1, rank, size, slots=size // 8) for rank, size in ((0, 48), (1, 40))]
    for one in calls:
        one.frames[:] = [(str(script), LINE, "forward")]
    run = stopped(*([one] for one in calls))
    found = sizes_apart(run)
    assert found is not None
    assert found.place(with_named_files(Sources(), [run])).line == 3
