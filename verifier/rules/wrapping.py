"""Rules on what `fully_shard` was applied to."""

from __future__ import annotations

import re

from ..blame import blame
from ..evidence import Evidence
from ..finding import Finding
from ..trace import Run
from . import groups
from .base import Rule, count, some
from .raised_mixed import stopped_on_plain_weights

NOT_USED = "the script never called fully_shard"


class TiedWeightsSplitGroups(Rule):
    """Parameters that are one tensor are one parameter of one group.

    Why: each group puts its own shards in the place of the parameters it finds. A weight that an embedding and a head
    share, taken by two groups, becomes two weights that train apart. torch 2.13 stops at the first forward with
    `is shared with a parameter already managed by another FSDP group`; older versions say nothing.
    Wrong:
        model.blocks[1].up.weight = model.blocks[0].up.weight  # tied, and then taken by two groups
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    Right:
        model.blocks[1].up.weight = model.blocks[0].up.weight
        fully_shard([model.blocks[0], model.blocks[1]])  # one group holds both ends of the tie
        fully_shard(model)
    Mend: Tie before sharding, and leave both modules to the root's group, or give them to one call:
    `fully_shard([embedding, head])`.
    Source: huggingface/accelerate PR#4171; pytorch/torchtitan#1524; huggingface/transformers PR#46707; pytorch#77724.
    Torch: run on 2.13.0 (the error, and the silent form with torch's check taken out) and 2.7.1 (silent).
    """

    name = "tied-weights-split-groups"
    family = "wrapping"
    simulated = True
    stops = re.compile(r"is shared with a parameter already managed by another FSDP group")

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.traces:
            return self.unknown("the script was not run")
        ties = [tie for record in run.places("ties") for tie in record["ties"]]
        stopped = None if run.completed else blame(run)
        raised = stopped is not None and self.stops.search(stopped.error) is not None
        for tie in ties:
            if tie["parameters"] > 1:
                what = "torch stops on it" if raised else "each trains on its own"
                return self.failed(
                    f"{' and '.join(tie['names'])} were one tensor when they were sharded, and are "
                    f"{tie['parameters']} parameters of different groups in the model: {what}",
                    tie["line"] or evidence.line_of(run, "ties"),
                )
        if raised and stopped is not None:
            return self.failed(stopped.text, stopped.location)
        if not run.models:
            return self.unknown("no forward of a model was seen")
        if ties:
            return self.passed(f"{' and '.join(ties[0]['names'])} are one parameter of one group")
        return self.passed("no two parameters of the model are one tensor")


class ParamsAddedAfterShard(Rule):
    """Every parameter is registered before the root is sharded.

    Why: `fully_shard` takes the parameters that are there. Adapters, a resized embedding or a new head that come later
    are plain tensors: never gathered, never reduced; every rank trains its own copy without an error.
    Wrong:
        shard(model)
        model.adapter = nn.Linear(8, 8)  # FSDP does not know it
    Right:
        model.adapter = nn.Linear(8, 8)
        shard(model)
    Mend: Register every parameter first and call `fully_shard` last.
    Source: hao-ai-lab/FastVideo PR#1666; huggingface/peft PR#3578.
    Torch: run on 2.13.0.
    """

    name = "params-added-after-shard"
    family = "wrapping"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        late = _late(run)
        if not late:
            return self.passed("no parameter was registered after its root was sharded")
        if run.world_size == 1:
            return self.unknown("one rank reduces nothing")
        line = evidence.line_of(run, "late")
        apart = [name for name in late if _gradients_differ(run, name)]
        if apart:
            return self.failed(
                f"registered after fully_shard took the model: {some(apart)}: plain tensors, whose gradients "
                "are not reduced and differ between ranks",
                line,
            )
        stopped = "" if run.completed else blame(run).error
        if re.search(r"mixed torch.Tensor and DTensor|The size of tensor a|shapes cannot be multiplied", stopped):
            return self.failed(
                f"registered after fully_shard took the model: {some(late)}, and the run stopped: {stopped[:160]}",
                line,
            )
        if run.steps() == 0:
            return self.unknown(f"{some(late)} are plain tensors, and no optimizer step was seen")
        return self.passed(f"{some(late)} came after sharding, with the same gradient on every rank")


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
        late = _late(run)  # those have a rule of their own
        plain = [
            n
            for n, e in run.parameters.items()
            if e[0]["trainable"] and not e[0]["managed"] and not e[0]["sharded"] and n not in late
        ]
        if not plain:
            return self.passed(f"{count(len(run.parameters), 'parameter')} managed by FSDP")
        apart = [name for name in plain if _gradients_differ(run, name)]
        crashed = stopped_on_plain_weights(run)
        if apart or crashed:
            what = "their gradients are not reduced and differ between ranks" if apart else "the run stopped on them"
            return self.failed(
                f"{some(apart or plain)} are plain tensors: {what}", evidence.line_of(run, "shard", last=True)
            )
        if run.steps() == 0:
            return self.unknown(f"{some(plain)} are plain tensors, and no optimizer step was seen")
        if run.role == "simulate":
            return self.unknown(
                f"{some(plain)} are plain tensors; whether the script reduces them only real ranks show"
            )
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


def _late(run: Run) -> list[str]:
    """Parameters that were registered after their root was sharded."""
    return [name for record in run.places("late") for name in record["names"]]


class ShardOptionUnread(Rule):
    """What `fully_shard` is given for an option is of the kind that it reads.

    Why: it looks for a `CPUOffloadPolicy` in `offload_policy` and for parameters in `ignored_params`, and passes over
    anything else without a word. FSDP1's `CPUOffload` offloads nothing; a module in `ignored_params` is sharded and
    trained like the rest.
    Wrong:
        model = Decoder()
        fully_shard(model, ignored_params={model.head})  # a module: its weight is sharded all the same
    Right:
        model = Decoder()
        fully_shard(model, ignored_params=set(model.head.parameters()))
    Mend: Give `offload_policy=CPUOffloadPolicy()`; give the parameters themselves: `set(module.parameters())`.
    Source: the docstring of `fully_shard`; FSDP1's options are in pytorch/torchtitan docs/fsdp.md.
    Torch: run on 2.13.0.
    """

    name = "shard-option-unread"
    family = "wrapping"
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        shards = run.places("shard") if run is not None else []
        if not shards:
            return self.unknown("no fully_shard was seen")
        for record in shards:
            if record["unread"]:
                return self.failed("; ".join(record["unread"]), record["at_line"])
        return self.passed("every option that was given to fully_shard is of the kind that it reads")


RULES = (ShardOptionUnread, TiedWeightsSplitGroups, ParamsAddedAfterShard, RootNotWrapped, *groups.RULES, RootOnlyWrap)
