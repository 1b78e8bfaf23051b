"""Rules on what a rank holds and what it sends, at any world size."""

from __future__ import annotations

from ..evidence import Evidence
from ..finding import Finding
from ..trace import Record, Run
from .base import Rule, count

FLOOR = 1 << 20  # bytes: below this, an uneven shard costs nothing
UNEVEN = 2.0
SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class ShardsAreEven(Rule):
    """Every rank holds about 1/N of the parameters.

    Why: `fully_shard` cuts dim 0 into at most as many pieces as it has rows. A stack of 8 experts `[8, ffn, width]` on
    64 ranks gives 8 ranks one expert each and 56 ranks nothing: memory does not fall any more, and nothing is raised.
    It shows only at the world size of production, so the simulated tier looks at it there.
    Wrong:
        for block in model.blocks:
            fully_shard(block)  # the largest dim of a stacked weight is not dim 0
        fully_shard(model)
    Right:
        longest = lambda p: Shard(max(range(p.ndim), key=lambda dim: p.shape[dim]))
        for block in model.blocks:
            fully_shard(block, shard_placement_fn=longest)
        fully_shard(model)
    Mend: Give `fully_shard` a `shard_placement_fn` that picks a dim of at least as many rows as there are ranks, and
    that their number divides.
    Source: the docstring of `fully_shard` (`shard_placement_fn`); pytorch/torchtitan shards experts on dim 1 where
    there are more ranks than experts.
    Torch: run on 2.13.0.
    """

    name = "shards-are-even"
    family = "wrapping"
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        held = {name: _held(entries) for name, entries in run.parameters.items() if entries[0]["sharded"]}
        ideal = {name: _whole(run, name) / _ways(run, name) for name in held}
        total, even = sum(held.values()), sum(ideal.values())
        told = f"at most {total / 2**20:.1f} MiB of parameters on a rank, {even / 2**20:.1f} MiB if all were even"
        if total <= UNEVEN * even or total - even < FLOOR:
            return self.passed(told, measured=float(total), limit=UNEVEN * even)
        worst = max(held, key=lambda name: held[name] - ideal[name])
        entry = run.parameters[worst][0]
        return self.failed(
            f"{told}; worst: {worst} of shape {entry['shape']}, placed {', '.join(entry['placements'])} on "
            f"{count(run.world_size, 'rank')}",
            evidence.line_of(run, "shard"),
            measured=float(total),
            limit=UNEVEN * even,
        )


class ModelGatheredEveryStep(Rule):
    """The script does not gather the whole model in every step, beside what forward and backward gather.

    Why: `full_tensor()` on every parameter, or a full state dict, is a collective over the whole model. In a loop, for
    a norm that is logged or an average that is kept, it doubles the traffic of a step and takes the memory of an
    unsharded model.
    Wrong:
        total = sum(p.full_tensor().square().sum() for p in model.parameters())
    Right:
        squares = torch.stack([p.square().sum().full_tensor() for p in model.parameters()])  # gathers scalars
        total = squares.sum()
    Mend: Work on the DTensor (or its local shard and one all-reduce) and gather only the result.
    Source: the docstring of `DTensor.full_tensor` (a collective); measured: the traffic of each step is counted.
    Torch: run on 2.13.0.
    """

    name = "model-gathered-every-step"
    family = "wrapping"
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        whole = sum(_whole(run, name) for name, entries in run.parameters.items() if entries[0]["sharded"])
        if whole == 0:
            return self.passed("no parameter is sharded")
        saved = {record["after_step"] + 1 for record in run.places("checkpoint")}
        steps = [r for r in run.places("traffic") if r["step"] > 1 and r["step"] not in saved]
        if not steps:
            return self.unknown("no step without a checkpoint was counted")
        least = min(_bytes(r["script"], "all_gather") for r in steps)
        told = f"{least:,} bytes gathered by the script in each step, {whole:,} bytes of sharded parameters"
        if least < whole:
            return self.passed(told, measured=float(least), limit=float(whole))
        line = next((entry["at_line"] for entry in steps[-1]["lines"]), None)
        return self.failed(told, line, measured=float(least), limit=float(whole))


def traffic(run: Run) -> dict[str, float]:
    """What one step costs a rank: the counts and bytes of collectives in the last counted step, for a report."""
    counted = list(run.places("traffic"))
    if not counted:
        return {}
    last = counted[-1]
    kinds = sorted(last["model"].keys() | last["script"].keys())
    out: dict[str, float] = {"fsdp_forwards": last["calls"]}
    for kind in kinds:
        for where in ("model", "script"):
            if kind in last[where]:
                out[f"{kind}_{where}"], out[f"{kind}_{where}_bytes"] = last[where][kind]
    return out


def expected(run: Run) -> dict[str, int]:
    """How often each kind should be called in forward and backward of that step, if all groups run once a micro-batch."""
    counted = list(run.places("traffic"))
    return dict(counted[-1]["expected"]) if counted else {}


def _held(entries: list[Record]) -> int:
    return max(int(e["local_numel"]) for e in entries) * SIZE.get(entries[0]["dtype"], 4)


def _whole(run: Run, name: str) -> int:
    entry = run.parameters[name][0]
    return int(entry["numel"]) * SIZE.get(entry["dtype"], 4)


def _ways(run: Run, name: str) -> int:
    """Into how many parts the placements mean to cut a parameter."""
    entry = run.parameters[name][0]
    ways = 1
    for size, placement in zip(entry["mesh"], entry["placements"], strict=True):
        ways *= size if "S" in placement else 1
    return ways


def _bytes(kinds: dict[str, list[int]], kind: str) -> int:
    return kinds.get(kind, [0, 0])[1]


RULES = (ShardsAreEven, ModelGatheredEveryStep)
