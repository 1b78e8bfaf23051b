from ...evidence import Evidence
from ..base import SourceRule


class UnusedSuppression(SourceRule):
    """Every `# fsdp2: ignore[rule] reason` names a rule, gives a reason, and has something to ignore; no `skip` is over.

    Why: a comment that outlives its fault hides the next one. One without a reason tells nobody whether it is still
    true, and one with a misspelt name ignores nothing. A `skip` in verify.yaml holds until its last day; after it, the
    rule is judged again.
    Wrong:
        fully_shard(model)  # fsdp2: ignore[root-only-wrap]
    Right:
        fully_shard(model)  # fsdp2: ignore[root-only-wrap] it has one layer
    Fix: Give the reason after the bracket, or take the comment, or the skip, away.
    Source: the like rules of other linters (RUF100 of ruff, `warn_unused_ignores` of mypy).
    Torch: of no account.
    """

    def applies(self, evidence: Evidence) -> str:
        return "" if evidence.suppressions else "no comment in the sources ignores a rule"
