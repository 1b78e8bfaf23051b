"""Rules on what the optimizer holds."""

from __future__ import annotations

from ..comparison import gradients_apart, incomparable, limits, undecided, update_apart
from ..evidence import Evidence
from ..finding import Finding
from ..static.sources import find_shard_use
from ..trace import Record, Run
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


class MatrixOptimizerOnLocalShard(Rule):
    """An optimizer of your own computes from whole tensors what needs whole tensors.

    Why: orthogonalising (Muon), preconditioning (Shampoo) and trust ratios (LAMB, LARS) are functions of the whole
    matrix. On `to_local()` they see some of its rows: another update, and another one at every world size (65 to 81 %
    off where it was measured). The loss falls all the same. Element by element on shards is fine.
    Wrong:
        with torch.no_grad():
            for p in model.parameters():
                grad = p.grad.to_local()  # some of the rows
                p.to_local().sub_(0.02 * grad / grad.norm())
    Right:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.02 * p.grad / p.grad.norm())  # on the DTensor: the norm of the whole
    Mend: Compute on the DTensor itself, or gather the matrix with `full_tensor()`, update, and keep the own shard
    (`distribute_tensor`); or use an optimizer that knows DTensor.
    Source: MoonshotAI/Moonlight#27; NVIDIA/Megatron-LM#5961; microsoft/dion PR#74; axolotl PR#2464.
    Torch: run on 2.13.0.
    """

    name = "matrix-optimizer-on-local-shard"
    family = "optimizer"
    needs = frozenset({"train", "exact", "reference", "envelope", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.exact, evidence.single
        if run is None or run.steps() == 0 or not run.completed:
            return self.unknown(evidence.missing.get("exact", "no optimizer step was seen"))
        own = [r["cls"] for r in run.places("optimizer") if not r["cls"].startswith("torch.optim.")]
        if not own:
            return self.passed("the optimizers are torch's own")
        cls = own[0].rpartition(".")[2]
        line = evidence.line_of(run, "shard_in_step") or find_shard_use(evidence.sources, cls)
        if line is None:
            return self.passed(f"{cls} asks for no shard")
        if run.world_size == 1:
            return self.unknown("one rank holds every tensor whole")
        if single is None:
            return self.unknown(evidence.missing.get("single", "no run in one process was made"))
        if (reason := incomparable(run, single, "single", "one process")) is not None:
            return self.unknown(f"{cls} works on shards, and {reason}")
        allowed = limits(evidence, self.name)
        gradients = max(gradients_apart(run, single, at_step=True).values(), default=0.0)
        if not gradients <= allowed.allowed["gradient at the step"]:
            return self.unknown(f"{cls} works on shards, and is given other gradients than in one process")
        update, _ = update_apart(run, single, 1)
        limit = allowed.allowed["update"]
        if update <= limit:
            return self.passed(
                f"{cls} works on shards and makes the update of one process", measured=update, limit=limit
            )
        if not allowed.differ({"update": update}):
            return self.unknown(f"{cls} works on shards: {undecided('first update', update, allowed)}")
        return self.failed(
            f"{cls} works on shards: from gradients that agree within {gradients:.1e}, its first update on {run.world_size} ranks is "
            f"{update:.0%} off that of one process",
            line,
            measured=update,
            limit=limit,
        )


def _judge_held(rule: Rule, evidence: Evidence, after_forward: bool) -> Finding:
    run = evidence.train
    if run is None or not run.models or not run.at_step("step", 1):
        return rule.unknown("no optimizer step was seen")
    record = run.at_step("step", 1)[0]
    firsts = [r for r in run.traces[0].of("step") if r["step"] == 1]
    number = next((r["optimizer"] for r in firsts if r["strangers"]), run.traces[0].first_optimizer)
    built: Record = next((r for r in run.traces[0].of("optimizer") if r["number"] == number), {})
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


RULES = (OptimBeforeShard, OptimBuiltAfterForward, MatrixOptimizerOnLocalShard)
