"""What the probe could not see must not pass, and what a library was told is in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from records import LINE, micro, model, run, step, stepped
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge
from verified_fsdp2.verifier.probe.events.raised import note
from verified_fsdp2.verifier.report.assemble import notes
from verified_fsdp2.verifier.trace.events import ProbeError

RIGHT = [model(), micro(), step(), stepped()]
DEAF = {"kind": "probe_error", "symbol": "ties", "text": "KeyError: 'x'"}


@pytest.mark.parametrize(("records", "status"), [([], "not_applicable"), ([DEAF], "inconclusive")])
def test_a_listener_that_failed_leaves_its_rules_open(records: list[dict[str, object]], status: str) -> None:
    evidence = Evidence(train=run(*[[*records, *RIGHT]] * 2))
    found, *others = judge(evidence, ["tied-weights-split-groups"])
    assert [(f.rule, f.status) for f in others] == [("verifier", "error")] * bool(records)
    assert found.status == status
    assert ("ties: KeyError" in found.evidence) is (status == "inconclusive")


def test_a_failure_while_an_error_is_noted_is_recorded() -> None:
    written: list[tuple[str, str]] = []

    class Broken:
        def stack(self, error: BaseException) -> list[object]:
            raise RuntimeError("no stack")

    class Written:
        def write(self, event: ProbeError) -> None:
            written.append((event.kind, event.text))

    note(Written(), Broken(), ValueError("the script's"))  # type: ignore[arg-type]
    assert written == [("probe_error", "RuntimeError: no stack")]


def test_what_a_library_was_told_is_a_note(tmp_path: Path) -> None:
    told = {"kind": "adapted", "library": "accelerate", "told": "it was told", "line": LINE}
    assert notes(None, Evidence(train=run([told, told], [told])), ()) == ["it was told"]
