from ...analysis.inspected import in_background
from ...analysis.saves import Save
from ...evidence import Evidence
from ...finding import Finding
from ..base import Rule
from ._holds import compare, has_tensors, nothing_saved


class AsyncSaveStateRace(Rule):
    """A save in the background holds what the ranks held when it was called.

    Why: training goes on while the background writes. Tensors that were not copied first (a stager that hands them on, a
    thread around `dcp.save` or `torch.save`) are written half before and half after the next step.
    Wrong:
        state = optimizer.state_dict()
        threading.Thread(target=lambda: torch.save(state, path)).start()  # the next step changes what is being written
    Right:
        state = copy.deepcopy(optimizer.state_dict())
        threading.Thread(target=lambda: torch.save(state, path)).start()
    Fix: Save with `dcp.async_save` and its default stager, or copy every tensor before the thread starts.
    Source: pytorch#144657; pytorch/torchtitan#930; Lightning-AI/pytorch-lightning#20953; meta-pytorch/torchrec PR#4322.
    """

    wants = "run"
    needs = frozenset({"train", "inspect"})

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or nothing_saved(evidence, _of_tensors, "no tensor is saved in the background")

    def judge(self, evidence: Evidence) -> Finding:
        return compare(self, evidence, in_background)


def _of_tensors(save: Save) -> bool:
    return in_background(save) and has_tensors(save)
