"""Rules on what the optimizer holds."""

from __future__ import annotations

from ..evidence import Evidence
from ..finding import Finding
from ..trace import Run
from .base import Rule, count, some


class OptimBeforeShard(Rule):
    """The optimizer is built after the last `fully_shard` (and after `to_empty`), so it holds the sharded parameters.

    Why: `fully_shard` replaces every parameter by a new DTensor parameter. An optimizer built before holds the old
    tensors: it steps without error, the model never changes, and `zero_grad` clears nothing, so gradients pile up.
    Wrong:
        optimizer = torch.optim.AdamW(model.parameters())
        shard(model)
    Right:
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    Mend: Move the construction of the optimizer (and of parameter groups and schedulers) below the last
    `fully_shard`.
    Source: mosaicml/composer PR#3822; huggingface/accelerate PR#4142.
    Torch: run on 2.13.0.
    """

    name = "optim-before-shard"
    family = "optimizer"

    def judge(self, evidence: Evidence) -> Finding:
        return _judge_held(self, evidence, after_forward=False)


class OptimBuiltAfterForward(Rule):
    """The optimizer is built before any forward, or after a reshard.

    Why: a forward leaves the root group unsharded (without gradients, or with `reshard_after_forward=False`, others
    too). `model.parameters()` then returns temporary plain tensors: the optimizer holds those, and embedding, norm
    and head never train while the blocks do.
    Wrong:
        shard(model)
        with torch.no_grad():
            model(batch)  # a shape check, a FLOP count, a first evaluation
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    Right:
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            model(batch)
    Mend: Build the optimizer right after sharding, or call `model.reshard()` before you build it.
    Source: pytorch#149205; pytorch#144289.
    Torch: run on 2.13.0.
    """

    name = "optim-built-after-forward"
    family = "optimizer"

    def judge(self, evidence: Evidence) -> Finding:
        return _judge_held(self, evidence, after_forward=True)


def _judge_held(rule: Rule, evidence: Evidence, after_forward: bool) -> Finding:
    run = evidence.train
    if run is None or not run.models or not run.at_step("step", 1):
        return rule.unknown("no optimizer step was seen")
    built = run.traces[0].first("optimizer") or {}
    record = run.at_step("step", 1)[0]
    missing = _missing(run, record["held"], record["strangers"])
    if not missing or bool(built.get("after_forward")) is not after_forward:
        return rule.passed(f"the optimizer holds {count(len(record['held']), 'parameter')} of the model")
    still = [n for n in missing if all(_unmoved(run, n, step) for step in range(1, run.steps() + 1))]
    when = "after a forward" if after_forward else "before the model was sharded"
    return rule.failed(
        f"the optimizer was built {when}: {len(missing)} of {len(run.parameters)} parameters ({some(missing)}) are not the "
        f"tensors that it holds, and {len(still)} of them did not change in {count(run.steps(), 'step')}",
        built.get("at_line"),
    )


def _missing(run: Run, held: list[str], strangers: list[list[int]]) -> list[str]:
    """Trainable parameters that no optimizer holds, while it holds a tensor of the same shape that is in no model."""
    shapes = {tuple(shape) for shape in strangers}
    everywhere = {n for r in run.traces[0].of("step") if r["step"] == 1 for n in r["held"]} | set(held)
    return [
        name
        for name, entries in run.parameters.items()
        if entries[0]["trainable"] and name not in everywhere and tuple(entries[0]["shape"]) in shapes
    ]


def _unmoved(run: Run, name: str, step: int) -> bool:
    return all(r["moved"].get(name, [0.0])[0] == 0.0 for r in run.at_step("stepped", step))


RULES = (OptimBeforeShard, OptimBuiltAfterForward)
