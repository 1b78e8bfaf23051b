from ...analysis.checkpoints import unseen_save
from ...tolerances import MERGED
from ...trace.events import Merged
from ..base import Evidence, Finding, Rule, some


class MergedWithAnotherScale(Rule):
    """Adapters are merged into the exported weights with the scale with which they were trained.

    Why: the module multiplies the adapters by a scale such as `alpha / r`. An export that leaves it
    out, or computes another one, is a file that loads everywhere and holds another model than the
    one that was trained and evaluated.
    Wrong:
        W, A, B = (torch.randn(4, 4) for _ in range(3))
        scale = 2.0  # alpha / r: the module computes with W + scale * (B @ A)
        merged = W + B @ A
    Right:
        W, A, B = (torch.randn(4, 4) for _ in range(3))
        scale = 2.0  # alpha / r: the module computes with W + scale * (B @ A)
        merged = W + scale * (B @ A)
    Fix: Merge with the scale that the forward of the module uses, read from the module.
    Source: law L10: when a file is written, the probe calls each module that has a base weight and
    adapters with the whole tensors that the script has gathered, and compares with the written
    weight.
    """

    reads = frozenset({"survey"})

    def applies(self, evidence: Evidence) -> str:
        seen = evidence.survey is not None and evidence.survey.all(Merged)
        return (
            ""
            if seen or unseen_save(evidence)
            else "no run wrote a file with adapters that were merged into weights"
        )

    def judge(self, evidence: Evidence) -> Finding:
        written = evidence.survey.all(Merged) if evidence.survey is not None else []
        other = [one for one in written if abs(one.factor - 1.0) > MERGED]
        if not other:
            return self.passed(f"{len(written)} merged weights compute what their modules do")
        names = some(one.name for one in other)
        text = (
            f"{names}: what the adapters add is written {other[0].factor:.4g} times (expected: 1)"
            " as large as in the forward"
        )
        return self.failed(text, other[0].at_line, measured=other[0].factor, limit=1.0)
