"""Rules on what `fully_shard` was applied to."""

from __future__ import annotations

from ..evidence import Evidence
from ..finding import Finding
from ..trace import Run
from .base import Rule, count, some

NOT_USED = "the script never called fully_shard"


class RootNotWrapped(Rule):
    """Every trainable parameter is managed by FSDP, or its gradient is averaged over the ranks by the script.

    Why: `fully_shard` on the blocks alone leaves the embedding, the last norm and the head as plain tensors. Their
    gradients are never reduced, every rank trains its own copy, and a checkpoint keeps one of them. With plain SGD,
    or `foreach=False`, nothing is raised.
    Wrong:
        for block in model.blocks:
            fully_shard(block)
    Right:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)  # takes every parameter that no block took
    Mend: Call `fully_shard(model)` on the root after the blocks. Do not silence `got mixed torch.Tensor and DTensor`
    with `foreach=False`.
    Source: Tencent-Hunyuan/UniRL PR#7; huggingface/transformers PR#36132; the docstring of `fully_shard` (bottom-up,
    then the root).
    Torch: run on 2.13.0.
    """

    name = "root-not-wrapped"
    family = "wrapping"
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        shards = run.traces[0].of("shard")
        if not shards:
            return self.unknown(NOT_USED)
        if run.world_size == 1:
            return self.unknown("one rank reduces nothing")
        plain = [
            n for n, e in run.parameters.items() if e[0]["trainable"] and not e[0]["managed"] and not e[0]["sharded"]
        ]
        if not plain:
            return self.passed(f"{count(len(run.parameters), 'parameter')} managed by FSDP")
        apart = [name for name in plain if _gradients_differ(run, name)]
        crashed = not run.completed and "mixed torch.Tensor and DTensor" in "".join(run.stderr.values())
        if apart or crashed:
            what = "their gradients are not reduced and differ between ranks" if apart else "the run stopped on them"
            return self.failed(
                f"{some(apart or plain)} are plain tensors: {what}", evidence.line_of(run, "shard", last=True)
            )
        if run.steps() == 0:
            return self.unknown(f"{some(plain)} are plain tensors, and no optimizer step was seen")
        return self.passed(f"{some(plain)} are plain tensors, with the same gradient on every rank")


class RootOnlyWrap(Rule):
    """Repeated blocks are groups of their own, not one group with the whole model.

    Why: each `fully_shard` call makes one group, gathered in one collective. With the root alone, every forward holds
    the whole unsharded model at once and nothing overlaps: the numbers are right and the memory saving is gone.
    Wrong:
        fully_shard(model)
    Right:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    Mend: Call `fully_shard` on each block before the root.
    Source: the docstring of `fully_shard` ("should not call fully_shard only on the topmost root module");
    huggingface/lerobot PR#4010.
    Torch: run on 2.13.0.
    """

    name = "root-only-wrap"
    family = "wrapping"
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        groups = [g for model in run.models for g in model["groups"]]
        if not groups:
            return self.unknown(NOT_USED)
        total = sum(e[0]["numel"] for e in run.parameters.values())
        blocks = max((b for m in run.models for b in m["blocks"]), key=lambda b: b["numel"], default=None)
        if len(groups) > 1 or blocks is None or 2 * blocks["numel"] < total:
            return self.passed(f"{count(len(groups), 'group')} for {total:,} parameter elements")
        kind = blocks["cls"].rpartition(".")[2]
        return self.failed(
            f"one group holds all {total:,} elements; the {blocks['count']} modules of class {kind} under "
            f"'{blocks['parent']}' hold {blocks['numel'] / total:.0%} of them and have no group of their own",
            evidence.line_of(run, "shard"),
        )


def _gradients_differ(run: Run, name: str) -> bool:
    """Whether at some step the ranks held different gradients of a plain parameter."""
    for step in range(1, run.steps() + 1):
        values = [r["grads_at_step"].get(name) for r in run.at_step("step", step)]
        if any(value != values[0] for value in values):
            return True
    return False


RULES = (RootNotWrapped, RootOnlyWrap)
