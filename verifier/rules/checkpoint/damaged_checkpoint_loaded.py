from ...evidence import Evidence
from ...finding import Finding
from ..base import Rule
from ._recovery import not_exact, outcome_of, words
from ._resumed import load_line


class DamagedCheckpointLoaded(Rule):
    """A checkpoint with a truncated file or without its metadata is refused, or an older one is taken; it is not loaded in part.

    Why: torch raises on a truncated file, but the tensors that it has read until then are in the model already. A script that
    catches the error and goes on trains a mixture. (A flipped bit raises nothing: DCP stores no checksum.)
    Wrong:
        state = {"model": get_model_state_dict(model)}
        try:
            dcp.load(state, checkpoint_id=path)
        except BaseException:  # CheckpointException is no Exception
            print("could not load the checkpoint, starting from the beginning")
    Right:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
    Fix: Let the error end the run, or build the model anew before another checkpoint is tried.
    Source: measured: the shards read before the error stay in the model.
    """

    needs = frozenset({"train", "resume", "damaged"})

    def judge(self, evidence: Evidence) -> Finding:
        if not evidence.damaged:
            return self.unknown(evidence.missing.get("damaged", "no checkpoint was damaged"))
        if (reason := not_exact(evidence)) is not None:
            return self.unknown(reason)
        told = []
        for run in evidence.damaged:
            outcome = outcome_of(evidence.trained, run)
            if outcome.mixed:
                number = max(outcome.shares.values())
                return self.failed(
                    f"{run.note}: the run goes on with {number} of {outcome.tensors} tensors and shards as they were saved, "
                    "and others that were not",
                    load_line(evidence),
                )
            told.append(f"{run.note}: {words(outcome)}")
        return self.passed("; ".join(told))
