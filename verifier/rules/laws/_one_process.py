"""What rules start from that compare other values than losses and weights with those of one
process.
"""

from abc import abstractmethod

from ...analysis.comparison import compare, incomparable, unlike
from ...analysis.limits import limits
from ..base import Evidence, Finding, Run
from ..parity._oracle import OracleRule


class OneProcessRule(OracleRule):
    """A rule on state of the full-precision run, where its losses and weights are those of one
    process.
    """

    in_windows = False

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.full_precision, evidence.single
        if run is None or single is None:
            return self.unknown(evidence.missing.get("single", "no run of one process was made"))
        if reason := unlike(run, single, "single", "one process"):
            return self.unknown(reason)
        # State is compared only where losses, gradients and weights are those of one process: else
        # the difference in state is a consequence. Equal numbers also prove equal samples.
        if limits(evidence, self.name).agree(
            compare(run, single).measures
        ):  # on the same samples, if padded otherwise
            return self.compare(evidence, run, single)
        already = (
            "losses, gradients or weights differ from those of one process already: see"
            " matches-single-process"
        )
        return self.unknown(incomparable(run, single, "single", "one process") or already)

    @abstractmethod
    def compare(self, evidence: Evidence, run: Run, single: Run) -> Finding:
        """The finding on these two runs."""
