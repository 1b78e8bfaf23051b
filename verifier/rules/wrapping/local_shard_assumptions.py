from ...trace.events import FromLocal
from ..base import Evidence, Finding, Rule, count


class LocalShardAssumptions(Rule):
    """`DTensor.from_local` on uneven shards gets the global `shape`.

    Why: if the ranks do not divide a dim evenly, the last ranks hold smaller or empty shards.
    `DTensor.from_local` without `shape` multiplies the local size by the number of ranks, so ranks
    assume different global shapes: statistics are divided by different numbers, a gather hangs or
    mixes rows, and no error is raised.
    Wrong:
        for param in model.parameters():
            size = DTensor.from_local(
                param.detach().to_local().abs(), param.device_mesh, param.placements
            )
            mean = size.sum().full_tensor() / size.numel()  # numel is a guess
    Right:
        for param in model.parameters():
            size = param.detach().abs()  # a DTensor already
            mean = size.sum().full_tensor() / size.numel()
    Fix: Compute on the DTensor itself, or pass `shape=param.shape, stride=param.stride()` to
    `from_local`.
    Source: NCAR/miles-credit PR#416; microsoft/dion PR#74; pytorch#136228.
    """

    wants = "run"

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        return (
            ""
            if run.all(FromLocal) or not run.completed or not run.models
            else "the script does not call DTensor.from_local"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        per_rank = [t.of(FromLocal) for t in run.traces]
        if not any(per_rank):
            return self.unknown("DTensor.from_local was not called before the run stopped")
        if len({len(records) for records in per_rank}) > 1 and run.completed:
            return self.unknown("ranks call DTensor.from_local a different number of times")
        for records in zip(*per_rank, strict=False):
            first = records[0]
            other = next(
                (r for r in records[1:] if r.ranks == first.ranks and r.shape != first.shape), None
            )
            if other is not None and other.at_line == first.at_line:
                shards = f"shards {tuple(first.local)} and {tuple(other.local)} on two ranks"
                shapes = f"the global shapes {tuple(first.shape)} and {tuple(other.shape)}"
                what = f"from_local of {shards} assumes {shapes}: `shape` was not given"
                # a gather of other sizes hangs or aborts (NCAR/miles-credit)
                effect = () if run.completed else ("run-completes",)
                return self.failed(what, first.at_line, explains=effect)
        return self.passed(
            f"{count(len(per_rank[0]), 'DTensor')} made by from_local, of one global shape on all"
            " ranks"
        )
