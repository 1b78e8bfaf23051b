"""`# fsdp2: ignore[rule] reason`: where it stands, what it covers, and when it is itself a fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pairs import HEAD, PRELUDE
from records import cases
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import apply_suppressions, judge
from verified_fsdp2.verifier.rules.lint import lint
from verified_fsdp2.verifier.source.lint import look
from verified_fsdp2.verifier.source.scan import with_sources
from verified_fsdp2.verifier.source.suppress import uses

ROOT_ONLY = HEAD + "model = Net()\n{above}fully_shard(model){after}\nfit(model)\n"


def verdict(tmp_path: Path, above: str = "", after: str = "", source: str = ROOT_ONLY) -> list[tuple[str, str]]:
    """(rule, what is said) of each finding of lint."""
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + source.format(above=above, after=after), encoding="utf-8")
    return [(f.rule, f.evidence) for f in lint([script]).findings]


def test_without_any(tmp_path: Path) -> None:
    assert [rule for rule, _ in verdict(tmp_path)] == ["root-only-wrap"]


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
    source = (
        HEAD
        + "model = Net()\nfully_shard(\n    model,\n    mesh=None,  # fsdp2: ignore[root-only-wrap] small\n)\nfit(model)\n"
    )
    assert verdict(tmp_path, source=source) == []


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


def test_on_another_line_it_covers_nothing(tmp_path: Path) -> None:
    source = HEAD + "model = Net()  # fsdp2: ignore[root-only-wrap] small\nfully_shard(model)\nfit(model)\n"
    assert [rule for rule, _ in verdict(tmp_path, source=source)] == ["unused-suppression", "root-only-wrap"][::-1]


def test_in_a_text_it_is_no_comment(tmp_path: Path) -> None:
    source = HEAD + 'text = "# fsdp2: ignore[root-only-wrap] x"\nfit(shard(Net()))\n'
    assert verdict(tmp_path, source=source) == []


def test_a_rule_that_lint_cannot_see_is_left_to_verify(tmp_path: Path) -> None:
    assert dict(verdict(tmp_path, after="  # fsdp2: ignore[matches-ddp] known")).keys() == {"root-only-wrap"}


class TestInAFullVerification:
    """Findings of runs are covered too, and what covers nothing is known when all rules have judged."""

    def evidence(self, tmp_path: Path, comment: str) -> tuple[Evidence, Path]:
        script = tmp_path / "train.py"
        script.write_text(PRELUDE + ROOT_ONLY.format(above="", after=f"  {comment}"), encoding="utf-8")
        return with_sources(Evidence(), script), script

    def test_a_static_hit_counts_where_the_runs_say_nothing(self, tmp_path: Path) -> None:
        evidence, _ = self.evidence(tmp_path, "")
        (finding,) = judge(evidence, ["root-only-wrap"])
        assert (finding.status, finding.tier) == ("fail", "static")

    def test_it_is_covered(self, tmp_path: Path) -> None:
        evidence, _ = self.evidence(tmp_path, "# fsdp2: ignore[root-only-wrap] one layer")
        first, second = judge(evidence, ["root-only-wrap", "unused-suppression"])
        assert (first.status, second.status) == ("pass", "pass")
        assert first.evidence.startswith("suppressed at train.py:") and first.evidence.endswith(": one layer")

    def test_a_finding_of_a_run_is_covered_at_its_line(self, tmp_path: Path) -> None:
        evidence, script = self.evidence(tmp_path, "# fsdp2: ignore[matches-ddp] another sum on purpose")
        line = look([script]).hits[0].location
        assert (
            apply_suppressions(Finding("matches-ddp", "fail", "x", location=line), evidence.suppressions).status
            == "pass"
        )
        elsewhere = replace(line, line=line.line + 1)
        assert (
            apply_suppressions(Finding("matches-ddp", "fail", "x", location=elsewhere), evidence.suppressions).status
            == "fail"
        )

    def test_one_that_covers_nothing_is_a_finding(self, tmp_path: Path) -> None:
        evidence, _ = self.evidence(tmp_path, "# fsdp2: ignore[cpu-offload-nccl-only] never seen")
        *_, last = judge(evidence, ["cpu-offload-nccl-only", "unused-suppression"])
        assert last.status == "fail" and "cpu-offload-nccl-only" in last.evidence

    def test_judging_changes_nothing(self, tmp_path: Path) -> None:
        name = "cpu-offload-nccl-only"
        evidence, script = self.evidence(tmp_path, f"# fsdp2: ignore[{name}] never seen")
        place = look([script]).hits[0].location
        first = [(f.rule, f.status) for f in judge(evidence, [name, "unused-suppression"])]
        assert apply_suppressions(Finding(name, "fail", "x", location=place), evidence.suppressions).status == "pass"
        again = [(f.rule, f.status) for f in judge(evidence, [name, "unused-suppression"])]
        assert first == again == [(name, "pass"), ("unused-suppression", "fail")]

    def test_what_was_used_follows_from_the_places(self, tmp_path: Path) -> None:
        evidence, script = self.evidence(tmp_path, "# fsdp2: ignore[root-only-wrap, matches-ddp] one layer")
        (one,) = evidence.suppressions
        ((hit, cover),) = look([script]).hidden
        assert (cover.location, cover.rules) == (one.location, one.rules)
        assert uses([one], [(hit.rule, hit.location)]) == {(one, "root-only-wrap")}
        assert uses([one], [("optim-before-shard", hit.location), ("matches-ddp", None)]) == frozenset()

    def test_one_of_a_rule_that_was_not_judged_is_left_alone(self, tmp_path: Path) -> None:
        evidence, _ = self.evidence(tmp_path, "# fsdp2: ignore[cpu-offload-nccl-only] never seen")
        (last,) = judge(evidence, ["unused-suppression"])
        assert last.status == "pass"
