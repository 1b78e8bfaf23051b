from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ...trace.events import Shard, Shards, ToEmpty
from ..base import Rule


class DtensorRngIdenticalShardsCpu(Rule):
    """Weights that are drawn on shards are other numbers on every rank.

    Why: the random numbers of a DTensor are told apart by rank on CUDA-like meshes only. On a CPU mesh, or with shards
    that `CPUOffloadPolicy` keeps on the CPU, every rank draws the same ones: the rows of a weight repeat from rank to
    rank, and all that is said is `DTensor random operators may not have complete support on cpu device mesh`.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # normal_ on DTensors: the same numbers on every rank
        model.init_buffers()
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        for param in model.parameters():
            full = torch.randn(param.shape) * 0.1  # one seed on all ranks: the same full tensor
            param.data.copy_(distribute_tensor(full, param.device_mesh, param.placements))
        model.init_buffers()
    Fix: On a CPU mesh draw the full tensor with one seed and take this rank's part (`distribute_tensor`), or
    initialise before sharding.
    Source: pytorch/torchtitan#3106, PR#4600; the warning of torch's DTensor RNG on a CPU mesh.
    """

    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        return "" if _cut(evidence.trained) else "no parameter is cut over several ranks"

    def unseen(self, evidence: Evidence) -> str:
        return ALONE if evidence.trained.world_size == 1 else ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        telling, same = [], []
        for name, ranks in _cut(run).items():
            shards = _digests(run, name, ranks)
            if all(shards):
                telling.append(name)
                if len(set(shards)) == 1:
                    same.append(name)
        if not telling:
            return self.unknown("every shard is too small, or constant, to be told from that of another rank")
        if 2 * len(same) < len(telling):
            return self.passed(f"{count(len(telling), 'parameter')} with other values on every rank")
        drawn = evidence.line_of(run, ToEmpty) or evidence.line_of(run, Shard, last=True)
        return self.failed(
            f"{count(len(same), 'parameter')} of {len(telling)} ({some(same)}) have bit for bit the same shard on every "
            "rank at the first forward",
            drawn,
        )


ALONE = "one rank has no other's shard to compare: give --nproc 2"


def _cut(run: Run) -> dict[str, list[int]]:
    """{parameter: the ranks that hold its first replica} of those that lie on several ranks."""
    ranks = {
        name: [e.rank for e in entries if e.sharded and e.copy == entries[0].copy]
        for name, entries in run.parameters.items()
    }
    return {name: own for name, own in ranks.items() if len(own) > 1}


def _digests(run: Run, name: str, ranks: list[int]) -> list[str | None]:
    """The digest of a parameter's shard at the first forward on each of `ranks`."""
    found = {t.rank: digests for t in run.traces for r in t.of(Shards) if name in (digests := r.digests)}
    return [found.get(rank, {}).get(name) for rank in ranks]
