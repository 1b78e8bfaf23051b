"""`# fsdp2: ignore[rule] reason`: where it stands, what it covers, and when it is itself a
fault.
"""

from dataclasses import replace
from pathlib import Path

from pairs import HEAD, PRELUDE
from records import cases
from scripts import written
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge
from verified_fsdp2.verifier.judging.all_findings import suppressed
from verified_fsdp2.verifier.rules.lint import lint
from verified_fsdp2.verifier.source.lint import look
from verified_fsdp2.verifier.source.scan import with_sources
from verified_fsdp2.verifier.source.suppress import uses

ROOT_ONLY = HEAD + "model = Net()\n{above}fully_shard(model){after}\nfit(model)\n"


def verdict(
    tmp_path: Path, above: str = "", after: str = "", source: str = ROOT_ONLY
) -> list[tuple[str, str]]:
    """(rule, what is said) of each finding of lint."""
    script = written(tmp_path, PRELUDE + source.format(above=above, after=after))
    return [(f.rule, f.evidence) for f in lint([script]).findings]


@cases(
    "above, after",
    ("", "  # fsdp2: ignore[root-only-wrap] one layer only"),
    ("# fsdp2: ignore[root-only-wrap] one layer only\n", ""),
    ("# fsdp2: ignore[root-only-wrap] one layer only\n# and another comment\n\n", ""),
    ("", "  #fsdp2:ignore[ root-only-wrap , root-only-wrap ] - one layer"),
)
def test_on_the_line_or_above(tmp_path: Path, above: str, after: str) -> None:
    assert verdict(tmp_path, above, after) == []


def test_anywhere_on_a_statement_of_several_lines(tmp_path: Path) -> None:
    call = "fully_shard(\n    model,\n    mesh=None,  # fsdp2: ignore[root-only-wrap] small\n)\n"
    assert verdict(tmp_path, source=HEAD + f"model = Net()\n{call}fit(model)\n") == []


@cases(
    "comment, message",
    ("# fsdp2: ignore[root-only-wrap]", "no reason"),
    ("# fsdp2: ignore[root-only-wrap]  -  ", "no reason"),
    ("# fsdp2: ignore[root-only-rap] small", "'root-only-rap'"),
    ("# fsdp2: ignore small", "names no rule"),
    ("# fsdp2: ignore[] small", "names no rule"),
    ("# fsdp2: ignore[optim-before-shard] small", "ignores optim-before-shard"),
)
def test_one_that_does_nothing_is_reported(tmp_path: Path, comment: str, message: str) -> None:
    findings = dict(verdict(tmp_path, after=f"  {comment}"))
    assert set(findings) == {"root-only-wrap", "unused-suppression"}
    assert message in findings["unused-suppression"]


@cases(
    "source, rules",
    (ROOT_ONLY.format(above="", after=""), {"root-only-wrap"}),
    (  # it stands on another line
        HEAD
        + "model = Net()  # fsdp2: ignore[root-only-wrap] small\nfully_shard(model)\nfit(model)\n",
        {"root-only-wrap", "unused-suppression"},
    ),
    (
        HEAD + 'text = "# fsdp2: ignore[root-only-wrap] x"\nfit(shard(Net()))\n',
        set(),
    ),  # in a text it is no comment
    (
        ROOT_ONLY.format(above="", after="  # fsdp2: ignore[matches-ddp] known"),
        {"root-only-wrap"},
    ),  # left to verify
)
def test_what_it_does_not_cover(tmp_path: Path, source: str, rules: set[str]) -> None:
    assert dict(verdict(tmp_path, source=source)).keys() == rules


COVERED = "cpu-offload-nccl-only"


class TestInAFullVerification:
    """Findings of runs are covered too, and what covers nothing is known when all rules have
    judged.
    """

    def evidence(self, tmp_path: Path, comment: str) -> tuple[Evidence, Path]:
        script = written(tmp_path, PRELUDE + ROOT_ONLY.format(above="", after=f"  {comment}"))
        return with_sources(Evidence(), script), script

    @cases(
        "comment, rules, found",
        ("", ["root-only-wrap"], [("fail", "static")]),  # the runs say nothing
        (
            "# fsdp2: ignore[root-only-wrap] one layer",
            ["root-only-wrap", "unused-suppression"],
            [("pass", "static"), ("pass", "static")],
        ),
        (
            f"# fsdp2: ignore[{COVERED}] never seen",
            ["unused-suppression"],
            [("pass", "static")],
        ),  # it was not judged
    )
    def test_the_status(
        self, tmp_path: Path, comment: str, rules: list[str], found: list[tuple[str, str]]
    ) -> None:
        judged = judge(self.evidence(tmp_path, comment)[0], rules)
        assert [f.status for f in judged] == [status for status, _ in found]
        if not comment:
            assert judged[0].tier == "static"
        elif len(rules) == 2:
            assert judged[0].evidence.startswith("suppressed at train.py:") and judged[
                0
            ].evidence.endswith(": one layer")

    def test_a_finding_of_a_run_is_covered_at_its_line(self, tmp_path: Path) -> None:
        evidence, script = self.evidence(
            tmp_path, "# fsdp2: ignore[matches-ddp] another sum on purpose"
        )
        line = look([script]).hits[0].location
        for place, status in ((line, "pass"), (replace(line, line=line.line + 1), "fail")):
            found = Finding("matches-ddp", "fail", "x", location=place)
            assert suppressed([found], evidence)[0].status == status

    def test_one_that_covers_nothing_is_a_finding_and_judging_changes_nothing(
        self, tmp_path: Path
    ) -> None:
        evidence, script = self.evidence(tmp_path, f"# fsdp2: ignore[{COVERED}] never seen")
        place = look([script]).hits[0].location
        first = judge(evidence, [COVERED, "unused-suppression"])
        assert [f.status for f in first] == ["not_applicable", "fail"] and COVERED in first[
            1
        ].evidence
        failed = Finding(COVERED, "fail", "x", location=place)
        assert suppressed([failed], evidence)[0].status == "pass"
        again = judge(evidence, [COVERED, "unused-suppression"])
        assert [(f.rule, f.status) for f in again] == [(f.rule, f.status) for f in first]

    def test_what_was_used_follows_from_the_places(self, tmp_path: Path) -> None:
        evidence, script = self.evidence(
            tmp_path, "# fsdp2: ignore[root-only-wrap, matches-ddp] one layer"
        )
        (one,) = evidence.suppressions
        ((hit, cover),) = look([script]).hidden
        assert (cover.location, cover.rules) == (one.location, one.rules)
        assert uses([one], [(hit.rule, hit.location)]) == {(one, "root-only-wrap")}
        assert (
            uses([one], [("optim-before-shard", hit.location), ("matches-ddp", None)])
            == frozenset()
        )
