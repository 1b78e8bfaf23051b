"""Errors of the probe: the rules that need the missing records are inconclusive, and changes to
libraries are in the report.
"""

from unittest import mock

import pytest

from records import LINE, Recorder, micro, model, run, step, stepped
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge
from verified_fsdp2.verifier.probe.events.raised import note
from verified_fsdp2.verifier.report.assemble import notes

RIGHT = [model(), micro(), step(), stepped()]
PROBE_ERROR = {"kind": "probe_error", "symbol": "ties", "text": "KeyError: 'x'"}


@pytest.mark.parametrize(
    ("records", "status"), [([], "not_applicable"), ([PROBE_ERROR], "inconclusive")]
)
def test_rules_are_inconclusive_after_an_error_of_their_topic(
    records: list[dict[str, object]], status: str
) -> None:
    found, *others = judge(
        Evidence(train=run(*[[*records, *RIGHT]] * 2)), ["tied-weights-split-groups"]
    )
    assert [(f.rule, f.status) for f in others] == [("verifier", "error")] * bool(records)
    assert found.status == status
    assert ("ties: KeyError" in found.evidence) is (status == "inconclusive")


def test_an_error_while_an_error_is_noted_is_recorded() -> None:
    written, frames = Recorder(), mock.Mock()
    frames.stack.side_effect = RuntimeError("no stack")
    note(written, frames, ValueError("the script's"))
    assert [(event.kind, event.text) for event in written.events] == [
        ("probe_error", "RuntimeError: no stack")
    ]


def test_a_change_to_a_library_is_a_note_once() -> None:
    adapted = {
        "kind": "adapted",
        "library": "accelerate",
        "text": "its state was changed",
        "line": LINE,
    }
    assert notes(None, Evidence(train=run([adapted, adapted], [adapted])), ()) == [
        "its state was changed"
    ]
