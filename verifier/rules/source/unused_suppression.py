from ..base import Evidence, SourceRule


class UnusedSuppression(SourceRule):
    """Every `# fsdp2: ignore[rule] reason` names a rule, has a reason and suppresses a finding; no
    `skip` has expired.

    Why: a comment that remains after its fault is fixed hides the next fault. Without a reason no
    reader can check it, and with a misspelt name it suppresses nothing. A `skip` in verify.yaml
    expires after its last day; then the rule is judged again.
    Wrong:
        fully_shard(model)  # fsdp2: ignore[root-only-wrap]
    Right:
        fully_shard(model)  # fsdp2: ignore[root-only-wrap] it has one layer
    Fix: Remove the comment or the skip; to keep a comment, give it the name of a rule that fails
    there, and a reason.
    Source: similar rules of other linters (RUF100 of ruff, `warn_unused_ignores` of mypy).
    Torch: not relevant.
    """

    def applies(self, evidence: Evidence) -> str:
        return "" if evidence.suppressions else "no comment in the sources ignores a rule"
