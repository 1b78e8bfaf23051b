"""Rules on what happens to groups while the model trains: who brings gradients, and what is gathered when."""

from __future__ import annotations

import re

from ..blame import blame
from ..evidence import Evidence
from ..finding import Finding
from ..trace import Record, Run
from .base import Rule, count, some


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
    Mend: Call `set_reduce_scatter_unused_params(True)` on the module, or use every parameter on every rank, if only
    times zero.
    Source: pytorch#158719, PR#170667, PR#174862; pytorch/torchtitan#2747; THUDM/slime PR#1010.
    Torch: run on 2.13.0.
    """

    name = "rank-divergent-param-use"
    family = "wrapping"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.traces:
            return self.unknown("the script was not run")
        if run.world_size == 1:
            return self.unknown("one rank reduces nothing")
        missing, about = _missing(run)
        for key, per_rank in missing.items():
            record = about[key]
            sets = {
                rank: per_rank.get(rank, frozenset())
                for rank in record["ranks"]
                if _came_to(run, rank, record, per_rank)
            }
            if record["filled"] or len(set(sets.values())) < 2:
                continue
            told = "; ".join(
                f"rank {rank} has none of {some(sorted(names))}" if names else f"rank {rank} has all"
                for rank, names in sorted(sets.items())[:4]
            )
            return self.failed(
                f"at step {record['step']} the ranks reduce gradients of different parameters of the group "
                f"'{record['group'] or 'root'}': {told}",
                record["at_line"],
            )
        if not run.models:
            return self.unknown("no forward of a model was seen")
        if missing:
            return self.passed(f"the same parameters lack a gradient on all ranks ({count(len(missing), 'reduction')})")
        return self.passed("every parameter brings a gradient to every reduction")


class InplaceOpOnOutputView(Rule):
    """The output of a wrapped module is not changed in place if it is a view.

    Why: FSDP gathers weights for backward in a hook on the output of the wrapped module. An in-place operation on a
    view (what `nn.Linear` gives for 3-D inputs, or a squeeze) makes autograd rewrite the node, and the hook is gone:
    backward meets freed weights (`setStorage ... out of bounds for storage of size 0`), or a reduction is left out.
    Wrong:
        logits = model(batch)  # the head gives a view of what it has computed in two dims
        logits *= 0.5
    Right:
        logits = model(batch)
        logits = logits * 0.5
    Mend: Use the out-of-place operation on the output of a wrapped module (`x = x + y`), or `.clone()` it first.
    Source: pytorch#181832, PR#181850; the UserWarning of torch 2.13 (`returned a view tensor`).
    Torch: run on 2.13.0.
    """

    name = "inplace-op-on-output-view"
    family = "wrapping"
    stops = re.compile(r"setStorage|out of bounds for storage of size 0")

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.traces:
            return self.unknown("the script was not run")
        changed = next((r for t in run.traces for r in t.of("inplace_view")), None)
        if changed is None:
            if not run.models:
                return self.unknown("no forward of a model was seen")
            return self.passed("no view that a wrapped module returned was changed in place before backward")
        told = f"the output of a wrapped {changed['module']} is a view, and it is changed in place before backward"
        stopped = "" if run.completed else blame(run).error
        if self.stops.search(stopped):
            return self.failed(f"{told}: the run stopped: {stopped[:160]}", changed["at_line"])
        unsynced = next((r for t in run.traces for r in t.of("step") if r["unsynced"]), None)
        if unsynced is not None:
            names = some(unsynced["unsynced"])
            return self.failed(
                f"{told}: at step {unsynced['step']} the gradients of {names} are not reduced", changed["at_line"]
            )
        return self.passed(f"{told}; every gradient was reduced all the same")


class StaleUnshardedAfterStep(Rule):
    """No forward runs on weights that were gathered before the last optimizer step.

    Why: a group that stays unsharded keeps a gathered copy. The optimizer updates the shards; if nothing frees the copy,
    the next forward finds it there, gathers nothing, and computes with the old weights. So it is after an evaluation
    between backward and step (the root stays gathered), and with `reshard_after_forward=False` after any.
    Wrong:
        loss_of(model, batch).backward()
        with torch.no_grad():
            loss_of(model, batch)  # gathers the root, and leaves it so
        optimizer.step()
    Right:
        loss_of(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            loss_of(model, batch)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    Mend: Evaluate after the step, not between backward and step, and call `reshard()` on every FSDPModule after it.
    Source: pytorch#149029, #154655, #144289 (the root stays gathered by design); measured: the same loss twice.
    Torch: run on 2.13.0.
    """

    name = "stale-unsharded-after-step"
    family = "wrapping"
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        stale = next((r for t in run.traces for r in t.of("stale")), None)
        if stale is not None:
            names = some(f"'{name or 'root'}'" for name in stale["groups"])
            return self.failed(
                f"the forward after step {stale['after_step']} uses weights of group {names} that were gathered before "
                "that step: the group was not resharded",
                stale["evaluated"] or stale["at_line"],
            )
        if run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        return self.passed(f"no group was left gathered over any of {count(run.steps(), 'step')}")


class LocalShardAssumptions(Rule):
    """Code that makes a DTensor of shards tells it the size of the whole.

    Why: a dim that does not divide by the ranks gives the last ranks smaller shards, or empty ones.
    `DTensor.from_local` without `shape` multiplies the local size by the ranks, so every rank believes in another
    tensor: statistics are divided by different numbers, a gather waits or mixes rows, and no error says so.
    Wrong:
        for param in model.parameters():
            size = DTensor.from_local(param.detach().to_local().abs(), param.device_mesh, param.placements)
            mean = size.sum().full_tensor() / size.numel()  # numel is a guess
    Right:
        for param in model.parameters():
            size = param.detach().abs()  # a DTensor already
            mean = size.sum().full_tensor() / size.numel()
    Mend: Compute on the DTensor itself, or pass `shape=param.shape, stride=param.stride()` to `from_local`.
    Source: NCAR/miles-credit PR#416; microsoft/dion PR#74; pytorch#136228.
    Torch: run on 2.13.0.
    """

    name = "local-shard-assumptions"
    family = "wrapping"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.traces:
            return self.unknown("the script was not run")
        per_rank = [t.of("from_local") for t in run.traces]
        if not any(per_rank):
            if not run.models:
                return self.unknown("no forward of a model was seen")
            return self.passed("the script makes no DTensor of local shards")
        if len({len(records) for records in per_rank}) > 1 and run.completed:
            return self.unknown("ranks make a different number of DTensors of local shards")
        for records in zip(*per_rank, strict=False):
            first = records[0]
            other = next(
                (r for r in records[1:] if r["ranks"] == first["ranks"] and r["shape"] != first["shape"]), None
            )
            if other is not None and other["at_line"] == first["at_line"]:
                return self.failed(
                    f"from_local takes shards of {tuple(first['local'])} and {tuple(other['local'])} on two ranks for parts of "
                    f"tensors of {tuple(first['shape'])} and {tuple(other['shape'])}: it was not told the size of the whole",
                    first["at_line"],
                )
        return self.passed(f"{count(len(per_rank[0]), 'DTensor')} made of local shards, of one size on all ranks")


_Key = tuple[tuple[int, ...], str, int, int]


def _missing(run: Run) -> tuple[dict[_Key, dict[int, frozenset[str]]], dict[_Key, Record]]:
    """For each reduction that some rank came to without all gradients: {rank: parameters without one}, and one record."""
    found: dict[_Key, dict[int, frozenset[str]]] = {}
    about: dict[_Key, Record] = {}
    for trace in run.traces:
        done = 0
        for record in trace.records:
            done += record["kind"] == "micro"
            if record["kind"] != "reduce":
                continue
            key = (tuple(record["ranks"]), record["group"], record["step"], record["micro"])
            names = frozenset(record["missing"])
            ranks = found.setdefault(key, {})
            ranks[trace.rank] = ranks.get(trace.rank, names) & names
            about.setdefault(key, {**record, "done": done})
    return dict(sorted(found.items(), key=lambda item: item[0][2:])), about


def _came_to(run: Run, rank: int, record: Record, per_rank: dict[int, frozenset[str]]) -> bool:
    """Whether a rank has come to this reduction: it said so, or it was in the same backward or a later one."""
    if rank in per_rank:
        return True
    trace = next((t for t in run.traces if t.rank == rank), None)
    raised = trace is None or (trace.end is not None and trace.end.how == "exception")
    return not raised and trace is not None and len(trace.of("micro")) >= record["done"]


RULES = (RankDivergentParamUse, InplaceOpOnOutputView, StaleUnshardedAfterStep, LocalShardAssumptions)
