from ...analysis.collective_sizes import sizes_apart
from ..base import Evidence, Finding, Rule

# What ranks look like that are in other calls after one of wrong size.
_SEEN_AS = ("run-completes", "rank-conditional-collective", "rank-local-control-flow")


class CollectiveSizesDiffer(Rule):
    """What a rank gives to a collective is as large as what the other ranks take.

    Why: a count that each rank takes from its own samples (slots of an expert, tokens kept, the
    last batch) sizes the buffers of a collective. Where the counts are equal it works; where they
    are not, NCCL hangs or mixes values up, and gloo ends the process.
    Wrong:
        slots = int(torch.bincount(torch.randint(4, (32,))).max())  # of this rank's tokens
        queue = torch.zeros(dist.get_world_size() * slots, 16)
        dist.all_to_all_single(torch.empty_like(queue), queue)
    Right:
        most = torch.bincount(torch.randint(4, (32,))).max()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        queue = torch.zeros(dist.get_world_size() * int(most), 16)
        dist.all_to_all_single(torch.empty_like(queue), queue)
    Fix: Agree on the size before the call: all-reduce the number with MAX and pad to it, or
    exchange the sizes and pass them as split sizes.
    Source: TTrace (faults of Megatron-LM's dispatch of tokens); the docstring of
    `all_to_all_single`.
    """

    wants = "nothing"
    explains = (*_SEEN_AS, "uneven-batches-hang")

    def judge(self, evidence: Evidence) -> Finding:
        train = evidence.train
        for run in (train, evidence.resume, evidence.survey):
            sizes = sizes_apart(run)
            if run is not None and sizes is not None:
                text = f"the {run.role} run stopped: {sizes.text()}"
                return self.failed(text, sizes.place(evidence.sources))
        if train is None or train.steps() == 0 or not train.completed:
            return self.unknown("the train run stopped for another reason (see run-completes)")
        return self.passed("no run was stopped by this cause")
