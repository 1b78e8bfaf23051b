from ...evidence import Evidence
from ...finding import Finding
from ..base import Rule
from ._recovery import NEEDS, not_exact, outcome_of, words
from ._resumed import save_line


class PartialOverwriteMixesCheckpoints(Rule):
    """A resume after a crash never mixes two checkpoints.

    Why: DCP replaces `__0_0.distcp` and the others in place while the old `.metadata` stays valid. After a crash between two
    of these writes the load succeeds, with half of the shards of one step and half of another. There is no checksum.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)  # the same folder every time
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{path}/step_{step:06d}")
    Fix: Give every save a folder of its own, or write to a temporary one and rename it when it is complete.
    Source: measured: half A, half B, no error; the same in xtuner PR#1703, VeOmni PR#1176, speculators PR#739.
    """

    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        if not evidence.crashes:
            return self.unknown(evidence.missing.get("crash", "no save was interrupted"))
        if (reason := not_exact(evidence)) is not None:
            return self.unknown(reason)
        told = []
        for crash, recovered in evidence.crashes:
            outcome = outcome_of(crash, recovered)
            if outcome.mixed:
                parts = ", ".join(
                    f"{number} from the save after step {k}" for k, number in sorted(outcome.shares.items())
                )
                return self.failed(
                    f"{crash.note}; the resume then starts from a mixture: of {outcome.tensors} tensors and shards, {parts}",
                    save_line(evidence),
                )
            told.append(words(outcome))
        return self.passed("after a crash in a save, " + "; ".join(told))
