from ...trace.events import ReplacedRead
from ..base import Evidence, Finding, Rule, count


class ReplacedParameterRead(Rule):
    """No code reads a parameter object that `fully_shard` or `to_empty` has replaced.

    Why: both put new parameters into the model. A list, a moving average, a regulariser or a logger
    that was built before still holds the old objects: they keep their initial values for ever and
    receive no gradient.
    Wrong:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        fully_shard(model)
        decay = sum(p.square().sum() for p in decayed)  # of the initial weights
        loss = loss_of(model, batch) + 1e-4 * decay
    Right:
        fully_shard(model)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        loss = loss_of(model, batch) + 1e-4 * sum(p.square().sum() for p in decayed)
    Fix: Take `model.parameters()` after sharding and after `to_empty`, or again at each use.
    Source: law L4: after `fully_shard` and `to_empty` the probe watches the parameter objects that
    are no longer in the model, and records each line of the training loop that computes with one.
    """

    def judge(self, evidence: Evidence) -> Finding:
        reads = evidence.trained.all(ReplacedRead)
        if not reads:
            return self.passed("no replaced parameter was read in training")
        first = reads[0]
        lines = count(
            len({(r.at_line.file, r.at_line.line) for r in reads if r.at_line is not None}),
            "such line",
        )
        what = (
            f"`{first.by}` reads {first.name} in step {first.step}, an object that is no longer in"
            " the model"
        )
        return self.failed(
            f"{what}: its values are those from before it was replaced ({lines})", first.at_line
        )
