from ._recovery import MixtureRule


class DamagedCheckpointLoaded(MixtureRule):
    """A checkpoint with a truncated file or without metadata is rejected, never loaded in part.

    Why: torch raises on a truncated file, but the tensors that it has read until then are in the
    model already. A script that catches the error and goes on trains a mixture. (A flipped bit
    raises nothing: DCP stores no checksum.)
    Wrong:
        state = {"model": get_model_state_dict(model)}
        try:
            dcp.load(state, checkpoint_id=path)
        except BaseException:  # CheckpointException is no Exception
            print("could not load the checkpoint, starting from the beginning")
    Right:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
    Fix: Let the error end the run, or build the model again before another checkpoint is tried.
    Source: NVIDIA/physicsnemo PR#2010 (a load that fails after the first of several models);
    measured: the shards read before the error stay in the model.
    """

    needs = frozenset({"train", "resume", "damaged"})
    fault = "damaged"
