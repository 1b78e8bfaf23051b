from ...analysis.inspected import in_background
from ...analysis.saves import Save
from ...evidence import Evidence
from ...finding import Finding
from ..base import Rule
from ._holds import compare, has_tensors, nothing_saved


class CheckpointHoldsWhatRanksHeld(Rule):
    """Every tensor of a checkpoint, opened by another process, is what the ranks gave to the save.

    Why: a save that raises nothing may still be wrong on the disk: a second save into the same folder replaces the first,
    ranks write over each other's file, a storage layer drops or casts.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)  # replaces the model
    Right:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    Fix: Save everything in one call, or each part into a folder of its own.
    Source: read back: every tensor of every save, compared with what the ranks held at the time of the call.
    """

    wants = "run"
    needs = frozenset({"train", "inspect"})
    names_a_cause = False

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or nothing_saved(
            evidence, _of_tensors, "no tensor is saved in the main thread"
        )

    def judge(self, evidence: Evidence) -> Finding:
        return compare(self, evidence, _of_tensors)


def _of_tensors(save: Save) -> bool:
    return not in_background(save) and has_tensors(save)
