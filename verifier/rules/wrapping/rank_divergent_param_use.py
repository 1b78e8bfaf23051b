from ...analysis.presence import unsharded
from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ...trace.events import Micro, Reduce
from ..base import Rule


class RankDivergentParamUse(Rule):
    """In every backward all ranks bring gradients of the same parameters to the reduction of a group.

    Why: only parameters with a gradient enter a group's reduce-scatter. Where an expert, a vision tower or a dropped
    layer is used on some ranks only, the sizes differ: gloo ends the process, NCCL hangs. Where they happen to be equal
    (two experts of one shape) nothing is raised, and one expert gets the sum of its own gradient and another's.
    Wrong:
        model.set_reduce_scatter_unused_params(False)  # the default
        expert = model.blocks[dist.get_rank() % 2]  # another one on every rank
        expert(torch.randn(4, 8)).sum().backward()
    Right:
        model.set_reduce_scatter_unused_params(True)  # who did not use a parameter brings zeros
        loss_of(model, batch).backward()
    Fix: Call `set_reduce_scatter_unused_params(True)` on the module, or use every parameter on every rank, if only
    times zero.
    Source: pytorch#158719, PR#170667, PR#174862; pytorch/torchtitan#2747; THUDM/slime PR#1010.
    """

    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        return unsharded(evidence.trained)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        if run.world_size == 1:
            return self.unknown("one rank reduces nothing")
        missing, about = _missing(run)
        for key, per_rank in missing.items():
            record, done = about[key]
            sets = {
                rank: per_rank.get(rank, frozenset()) for rank in record.ranks if _came_to(run, rank, done, per_rank)
            }
            if record.filled or len(set(sets.values())) < 2:
                continue
            told = "; ".join(
                f"rank {rank} has none of {some(sorted(names))}" if names else f"rank {rank} has all"
                for rank, names in sorted(sets.items())[:4]
            )
            return self.failed(
                f"at step {record.step} the ranks reduce gradients of different parameters of the group "
                f"'{record.group or 'root'}': {told}",
                record.at_line,
            )
        if run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        if missing:
            return self.passed(f"the same parameters lack a gradient on all ranks ({count(len(missing), 'reduction')})")
        return self.passed("every parameter brings a gradient to every reduction")


_Key = tuple[tuple[int, ...], str, int, int]


def _missing(run: Run) -> tuple[dict[_Key, dict[int, frozenset[str]]], dict[_Key, tuple[Reduce, int]]]:
    """For each reduction to which some rank came without all gradients: {rank: parameters without one}.

    And by reduction: one record of it, and how many backwards its rank had ended before.
    """
    found: dict[_Key, dict[int, frozenset[str]]] = {}
    about: dict[_Key, tuple[Reduce, int]] = {}
    for trace in run.traces:
        done = 0
        for record in trace.records:
            done += isinstance(record, Micro)
            if not isinstance(record, Reduce):
                continue
            key = (tuple(record.ranks), record.group, record.step, record.micro)
            names = frozenset(record.missing)
            ranks = found.setdefault(key, {})
            ranks[trace.rank] = ranks.get(trace.rank, names) & names
            about.setdefault(key, (record, done))
    return dict(sorted(found.items(), key=lambda item: item[0][2:])), about


def _came_to(run: Run, rank: int, done: int, per_rank: dict[int, frozenset[str]]) -> bool:
    """Whether a rank has come to this reduction: it said so, or it was in the same backward or a later one."""
    if rank in per_rank:
        return True
    trace = next((t for t in run.traces if t.rank == rank), None)
    raised = trace is None or (trace.end is not None and trace.end.how == "exception")
    return not raised and trace is not None and len(trace.of(Micro)) >= done
