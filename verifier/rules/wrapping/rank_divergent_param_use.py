from ...trace.events import Micro, Reduce
from ..base import Evidence, Finding, Run, count, some
from ._base import ONE_RANK, ShardedModelRule


class RankDivergentParamUse(ShardedModelRule):
    """In every backward all ranks reduce gradients of the same parameters of a group.

    Why: only parameters with a gradient enter a group's reduce-scatter. Where an expert, a vision
    tower or a dropped layer is used on some ranks only, the sizes differ: gloo aborts the process,
    NCCL hangs. Where they happen to be equal (two experts of one shape) nothing is raised, and one
    expert gets the sum of its own gradient and another's.
    Wrong:
        model.set_reduce_scatter_unused_params(False)  # the default
        expert = model.blocks[dist.get_rank() % 2]  # differs between ranks
        expert(torch.randn(4, 8)).sum().backward()
    Right:
        model.set_reduce_scatter_unused_params(True)  # unused parameters are reduced as zeros
        loss_of(model, batch).backward()
    Fix: Call `set_reduce_scatter_unused_params(True)` on the module, or use every parameter on
    every rank (scaled by 0).
    Source: pytorch#158719, PR#170667, PR#174862; pytorch/torchtitan#2747; THUDM/slime PR#1010.
    """

    explains = ("run-completes",)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        if run.world_size == 1:
            return self.unknown(ONE_RANK)
        found = _incomplete(run)
        for record, done, missing in found:
            reached = [r for r in record.ranks if r in missing or _reached(run, r, done)]
            sets = {rank: missing.get(rank, frozenset()) for rank in reached}
            # Where FSDP puts zeros in place of missing gradients, or all ranks lack the same ones,
            # the reduction is right (zoo/two_experts.py).
            if record.filled or len(set(sets.values())) < 2:
                continue
            lacks = {
                rank: f"none of {some(sorted(names), 1)}" if names else "all"
                for rank, names in sets.items()
            }
            differ = "; ".join(
                f"rank {rank} has {what}" for rank, what in sorted(lacks.items())[:3]
            )
            what = (
                "the ranks reduce gradients of different parameters of group"
                f" '{record.group or 'root'}'"
            )
            return self.failed(f"at step {record.step} {what}: {differ}", record.at_line)
        if not found:
            return self.passed_with_steps(run, "every parameter has a gradient in every reduction")
        what = (
            "all ranks lack the gradients of the same parameters"
            f" ({count(len(found), 'reduction')})"
        )
        return self.passed_with_steps(run, what)


def _incomplete(run: Run) -> list[tuple[Reduce, int, dict[int, frozenset[str]]]]:
    """(record, backwards of its rank before it, {rank: parameters without gradient}) of incomplete
    reductions, by step.
    """
    found: dict[
        tuple[int, int, str, tuple[int, ...]], tuple[Reduce, int, dict[int, frozenset[str]]]
    ] = {}
    for trace in run.traces:
        done = 0
        for record in trace.records:
            done += isinstance(record, Micro)
            if isinstance(record, Reduce):
                key = (record.step, record.micro, record.group, tuple(record.ranks))
                _, _, missing = found.setdefault(key, (record, done, {}))
                names = frozenset(record.missing)
                missing[trace.rank] = missing.get(trace.rank, names) & names
    return [found[key] for key in sorted(found, key=lambda key: key[:2])]


def _reached(run: Run, rank: int, done: int) -> bool:
    """Whether a rank without a record of a reduction reached it: it was in the same backward or a
    later one.
    """
    trace = next((t for t in run.traces if t.rank == rank), None)
    # A rank that raised did not reach the reduction: nothing is known of its gradients.
    if trace is None or (trace.end is not None and trace.end.how == "exception"):
        return False
    return len(trace.of(Micro)) >= done
