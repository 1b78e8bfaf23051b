import math

from ...evidence import Evidence
from ...finding import Finding
from ...launch.average import MEAN, RIGHT
from ...trace import Run
from ...trace.events import Start
from ..base import Rule


class GlooAvgIsSum(Rule):
    """An average over ranks is an average: `reduce_scatter_tensor(op=AVG)` does what it says.

    Why: on older torch gloo ignores AVG and gives the sum, without a word. FSDP2 averages gradients with it, so on a
    CPU every gradient is as many times too large as there are ranks. NCCL is right. It is a fault of the environment:
    every comparison of numbers on this machine shows it, whatever the script does.
    Wrong:
        whole, part = torch.ones(dist.get_world_size()), torch.empty(1)
        dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)  # torch 2.7.1, gloo: the sum
    Right:
        whole, part = torch.ones(dist.get_world_size()), torch.empty(1)
        dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.SUM)
        part.div_(dist.get_world_size())
    Fix: Use a newer torch (2.13.0 is right), or run on GPUs with NCCL; on this torch,
    `set_force_sum_reduction_for_comms(True)` on every FSDP module where there is such a method.
    Source: pytorch#162338; pytorch PR#162344; PR#149781.
    Torch: run on 2.13.0 (right, by version and by measurement); 2.7.1 (wrong: 3 for 1.5).
    """

    wants = "run"

    def applies(self, evidence: Evidence) -> str:
        unasked = evidence.average is None and _version(evidence.trained) not in RIGHT
        return "gloo does not reduce here" if unasked else ""

    def judge(self, evidence: Evidence) -> Finding:
        run, average = evidence.trained, evidence.average
        if average is None:
            return self.passed(f"gloo of torch {_version(run)} is known to average")
        if math.isnan(average):
            return self.unknown("two ranks of gloo could not take an average")
        if abs(average - MEAN) > 1e-6:
            return self.failed(
                f"gloo gives {average:g} for the average of 1 and 2 ({MEAN:g}): gradients of FSDP2 are {run.world_size} times too "
                "large on this machine, whatever the script does",
                measured=average,
                limit=MEAN,
            )
        return self.passed(f"gloo gives {MEAN:g} for the average of 1 and 2", measured=average, limit=MEAN)


def _version(run: Run) -> str:
    start = run.traces[0].first(Start)
    return start.torch.partition("+")[0] if start is not None else ""
