import math

from ...probe.compat.names import MEAN, averages
from ...trace.events import Start
from ..base import Evidence, Finding, Rule, Run
from ..policies import OnlyOnCpu


class GlooAvgIsSum(Rule):
    """`ReduceOp.AVG` averages in gloo's `reduce_scatter_tensor`.

    Why: with older torch versions gloo silently computes the sum. FSDP2 averages gradients with it,
    so on CPU every gradient is too large by a factor of the world size, whatever the script does.
    NCCL is right. The verifier averages in gloo's place, so that every other rule judges the script
    as on a torch that is right: this is a warning.
    Wrong:
        whole, part = torch.ones(dist.get_world_size()), torch.empty(1)
        dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)  # torch 2.7.1, gloo: the sum
    Right:
        whole, part = torch.ones(dist.get_world_size()), torch.empty(1)
        dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.SUM)
        part.div_(dist.get_world_size())
    Fix: Use a newer torch (2.13.0 is right), or run on GPUs with NCCL; else call
    `set_force_sum_reduction_for_comms(True)` on every FSDP module, if this torch has it.
    Source: pytorch#162338; pytorch PR#162344; PR#149781.
    Torch: run on 2.13.0 and 2.14.1 (right, by version and by measurement); 2.7.1 and 2.8.0 (wrong:
    3 for 1.5).
    """

    wants = "run"
    policies = (OnlyOnCpu(),)

    def applies(self, evidence: Evidence) -> str:
        unmeasured = evidence.average is None and not averages(_version(evidence.trained))
        return "gloo is not used for reductions" if unmeasured else ""

    def judge(self, evidence: Evidence) -> Finding:
        run, average = evidence.trained, evidence.average
        if average is None:
            return self.passed(f"gloo of torch {_version(run)} is known to average")
        if math.isnan(average):
            return self.unknown("the average of two ranks could not be measured with gloo")
        text = f"gloo gives {average:g} for the average of 1 and 2"
        # The average of 1 and 2 is exact in float32; a gloo that sums gives 3 (torch 2.7 and 2.8
        # (references/reliability.md Versions)).
        if abs(average - MEAN) <= 1e-6:
            return self.passed(text, measured=average, limit=MEAN)
        text += (
            f" (expected: {MEAN:g}): without fsdp2, gradients on CPU are {run.world_size} times too"
            " large with this torch"
        )
        text += "; here they were averaged in its place"
        # The verifier averages in gloo's place there, so the verdict stands: the fault is this
        # torch's on the CPU, not the script's (torch 2.8.0 right scripts (14 of 14)).
        return self.failed(text, measured=average, limit=MEAN, required=False)


def _version(run: Run) -> str:
    start = run.traces[0].first(Start)
    return start.torch.partition("+")[0] if start is not None else ""
