from ...analysis.reopened_checkpoints import in_background
from ...analysis.saves import Save
from ._saved import ContentRule, has_tensors


class AsyncSaveStateRace(ContentRule):
    """A background save contains the tensors as they were at the time of the call.

    Why: training goes on while the background writes. Tensors that were not copied first (a stager
    that passes them on, a thread around `dcp.save` or `torch.save`) are written half before and
    half after the next step.
    Wrong:
        state = optimizer.state_dict()
        # the next step changes what is being written
        threading.Thread(target=lambda: torch.save(state, path)).start()
    Right:
        state = copy.deepcopy(optimizer.state_dict())
        threading.Thread(target=lambda: torch.save(state, path)).start()
    Fix: Save with `dcp.async_save` and its default stager, or copy every tensor before the thread
    starts.
    Source: pytorch#144657; pytorch/torchtitan#930; Lightning-AI/pytorch-lightning#20953;
    meta-pytorch/torchrec PR#4322.
    """

    kind = "save of a tensor in the background"

    def about(self, save: Save) -> bool:
        return in_background(save) and has_tensors(save)
