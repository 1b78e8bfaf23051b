import math

from ...trace.events import AsksForAccelerators, Shard, Shards, Stepped, ToEmpty
from ..base import Evidence, Finding, Rule, Run, count, some


class DtensorRngIdenticalShardsCpu(Rule):
    """Sharded initialisation uses a different random stream on every rank.

    Why: DTensor gives each rank its own random stream on CUDA-like meshes only. On a CPU mesh, or
    with shards that `CPUOffloadPolicy` keeps on the CPU, all ranks draw the same numbers: the rows
    of a weight repeat from rank to rank, and torch only warns `DTensor random operators may not
    have complete support on cpu device mesh`.
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
    Fix: On a CPU mesh draw the full tensor with one seed and `distribute_tensor` it, or initialise
    before sharding.
    Source: pytorch/torchtitan#3106, PR#4600; the warning of torch's DTensor RNG on a CPU mesh.
    Fewer than half of the parameters may begin as copies on purpose; they fail if training has
    moved them and not parted them. It warns where the script would take a GPU if there were one.
    """

    wants = "models"
    reads = frozenset({"survey"})

    def applies(self, evidence: Evidence) -> str:
        return "" if _sharded(evidence.trained) else "no parameter is sharded over several ranks"

    def unseen(self, evidence: Evidence) -> str:
        return (
            "one rank has no other shard to compare with: give --nproc 2"
            if evidence.trained.world_size == 1
            else ""
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        digests = {name: _digests(run, name, ranks) for name, ranks in _sharded(run).items()}
        # Constant or tiny shards are equal on all ranks rightly: they have no digest (biases of
        # zeros, norms of ones).
        known = {name: set(shards) for name, shards in digests.items() if all(shards)}
        if not known:
            return self.unknown(
                "every shard is too small, or constant, to differ from that of another rank"
            )
        same = [name for name, shards in known.items() if len(shards) == 1]
        still = ""
        # If most parameters have equal shards, the generator drew alike. A few may be copies on
        # purpose (experts made of one layer): they fail only if training does not part them (exam
        # round 12 na_04_lora_init (missed); experts made as copies).
        if 2 * len(same) < len(
            known
        ):  # copies on purpose, such as experts made of one layer, part in training
            same = [name for name in same if _moved_alike(run, name, _sharded(run)[name])]
            still = ", and still after the last step: they learn the same"
        if not same:
            return self.passed(
                f"{count(len(known), 'parameter')}, whose shards differ between ranks"
            )
        what = f"{some(same)}: all ranks hold bitwise the same shard at the first forward{still}"
        drawn = run.line_of(ToEmpty) or run.line_of(Shard, last=True)
        what += f" ({len(same)} of {len(known)} parameters)"
        # OLMo-core on the CPU, in place: it chooses the CPU only where there is no GPU
        if _takes_a_gpu(evidence) and not still:
            there = (
                "the script takes a GPU where there is one, whose mesh has a stream for each rank"
            )
            return self.failed(f"{what}; {there}", drawn, required=False)
        return self.failed(what, drawn)


def _takes_a_gpu(evidence: Evidence) -> bool:
    """Whether the script asked for accelerators, and ran on the CPU for want of one."""
    runs = (evidence.survey, evidence.trained)
    asked = any(one is not None and one.all(AsksForAccelerators) for one in runs)
    return asked and not evidence.cuda_on_cpu


def _sharded(run: Run) -> dict[str, list[int]]:
    """{parameter: the ranks that hold its first replica} of those that lie on several ranks."""
    held = [
        # Replicas of a hybrid mesh have equal shards rightly: only the ranks of one replica are
        # compared (zoo/hsdp.py).
        (n, [e.rank for e in es if e.sharded and e.copy == es[0].copy])
        for n, es in run.parameters.items()
    ]
    return {name: ranks for name, ranks in held if len(ranks) > 1}


def _moved_alike(run: Run, name: str, ranks: list[int]) -> bool:
    """Whether training has changed a parameter, and its shards on these ranks have the same length
    to the last bit.
    """
    own = {
        trace.rank: [s.weights[name][0] for s in trace.of(Stepped) if name in s.weights]
        for trace in run.traces
    }
    ends = [end for rank in ranks for end in own.get(rank, [])[-1:]]
    alike = (
        len(ends) == len(ranks) and math.isfinite(ends[0]) and all(end == ends[0] for end in ends)
    )
    # A frozen parameter cannot part: only one that training changed, and whose shards still have
    # bitwise the same length, learns the same on all ranks (frozen copies (test_wrapping_rules.py
    # adapters(2.0, 2.0))).
    return alike and any(length != ends[0] for length in own[ranks[0]])


def _digests(run: Run, name: str, ranks: list[int]) -> list[str | None]:
    """The digest of a parameter's shard at the first forward on each of `ranks`."""
    found = {
        t.rank: digests for t in run.traces for r in t.of(Shards) if name in (digests := r.digests)
    }
    return [found.get(rank, {}).get(name) for rank in ranks]
