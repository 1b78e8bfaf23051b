from ...analysis.applicability import went_through
from ...trace.events import Divide, Place
from ..base import Evidence, RaisedRule, RootCause, Run
from ..policies import OnlyOnCpu


class GlooPremulSum(RaisedRule):
    """With gloo, `set_gradient_divide_factor` needs forced sum reduction.

    Why: FSDP passes a custom factor to the reduction as PREMUL_SUM, which NCCL has and gloo does
    not.
    Wrong:
        model.set_gradient_divide_factor(1.0)
        loss_of(model, batch).backward()  # at two ranks: Cannot use ReduceOp.PREMUL_SUM with Gloo
    Right:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        loss_of(model, batch).backward()
    Fix: Call `set_force_sum_reduction_for_comms(True)` on every FSDPModule that has a divide
    factor.
    Source: the docstring of `set_gradient_divide_factor`; verl PR#7917.
    """

    simulated = False
    policies = (OnlyOnCpu(),)
    pattern = r"Cannot use ReduceOp\.PREMUL_SUM with Gloo"

    def absent(self, train: Run) -> str:
        return "" if train.all(Divide) else "the script sets no gradient divide factor"

    def unseen(self, evidence: Evidence) -> str:
        alone = went_through(evidence) and evidence.trained.world_size == 1
        return "not checked with one rank, which reduces nothing: give --nproc 2" if alone else ""

    def place(self, run: Run, cause: RootCause) -> Place | None:
        return run.line_of(Divide, last=True) or cause.location
