from ...analysis.reopened_checkpoints import in_background
from ...analysis.saves import Save
from ._saved import ContentRule, has_tensors


class CheckpointHoldsWhatRanksHeld(ContentRule):
    """A checkpoint, read by another process, contains every tensor that the ranks gave to the save.

    Why: a save that raises nothing may still be wrong on disk: a second save into the same folder
    replaces the first, ranks overwrite each other's file, a storage layer drops or casts.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path)  # replaces the model
    Right:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    Fix: Save everything in one call, or each part into a folder of its own.
    Source: read back: every tensor of every save, compared with what the ranks held at the time of
    the call.
    """

    kind = "save of a tensor in the main thread"
    names_a_cause = False

    def about(self, save: Save) -> bool:
        return not in_background(save) and has_tensors(save)
