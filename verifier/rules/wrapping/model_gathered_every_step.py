from ...analysis.presence import unsharded
from ...analysis.traffic import whole_bytes
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Checkpoint, Traffic
from ..base import Rule


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
    Fix: Work on the DTensor (or its local shard and one all-reduce) and gather only the result.
    Source: the docstring of `DTensor.full_tensor` (a collective); measured: the traffic of each step is counted.
    """

    simulated = True

    def applies(self, evidence: Evidence) -> str:
        return unsharded(evidence.trained)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        size = sum(whole_bytes(run, name) for name, entries in run.parameters.items() if entries[0].sharded)
        if size == 0:
            return self.unknown("no parameter of the model that was seen is sharded")
        saved = {record.after_step + 1 for record in run.places(Checkpoint)}
        steps = [r for r in run.places(Traffic) if r.step > 1 and r.step not in saved]
        if not steps:
            return self.unknown("no step without a checkpoint was counted")
        least = min(_bytes(r.script, "all_gather") for r in steps)
        told = f"{least:,} bytes gathered by the script in each step, {size:,} bytes of sharded parameters"
        if least < size:
            return self.passed(told, measured=float(least), limit=float(size))
        line = next((entry.at_line for entry in steps[-1].lines), None)
        return self.failed(told, line, measured=float(least), limit=float(size))


def _bytes(kinds: dict[str, list[int]], kind: str) -> int:
    return kinds.get(kind, [0, 0])[1]
