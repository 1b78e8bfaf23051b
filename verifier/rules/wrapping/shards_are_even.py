from ...analysis.presence import unsharded
from ...analysis.traffic import SIZE, whole_bytes
from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ...trace.events import Parameter, Shard
from ..base import Rule

FLOOR = 1 << 20  # bytes: below this, an uneven shard costs nothing


UNEVEN = 2.0


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
    Fix: Give `fully_shard` a `shard_placement_fn` that picks a dim of at least as many rows as there are ranks, and
    that their number divides.
    Source: the docstring of `fully_shard` (`shard_placement_fn`); pytorch/torchtitan shards experts on dim 1 where
    there are more ranks than experts.
    """

    wants = "models"
    simulated = True

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        return "one rank holds all there is" if run.world_size == 1 else unsharded(run)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        held = {name: _held(entries) for name, entries in run.parameters.items() if entries[0].sharded}
        if not held:
            return self.unknown("no parameter of the model that was seen is sharded")
        ideal = {name: whole_bytes(run, name) / _ways(run, name) for name in held}
        total, even = sum(held.values()), sum(ideal.values())
        told = f"at most {total / 2**20:.1f} MiB of parameters on a rank, {even / 2**20:.1f} MiB if all were even"
        if total <= UNEVEN * even or total - even < FLOOR:
            return self.passed(told, measured=float(total), limit=UNEVEN * even)
        worst = max(held, key=lambda name: held[name] - ideal[name])
        entry = run.parameters[worst][0]
        return self.failed(
            f"{told}; worst: {worst} of shape {entry.shape}, placed {', '.join(entry.placements)} on "
            f"{count(run.world_size, 'rank')}",
            evidence.line_of(run, Shard),
            measured=float(total),
            limit=UNEVEN * even,
        )


def _held(entries: list[Parameter]) -> int:
    return max(int(e.local_numel) for e in entries) * SIZE.get(entries[0].dtype, 4)


def _ways(run: Run, name: str) -> int:
    """Into how many parts the placements mean to cut a parameter."""
    entry = run.parameters[name][0]
    ways = 1
    for size, placement in zip(entry.mesh, entry.placements, strict=True):
        ways *= size if "S" in placement else 1
    return ways
