"""Rules on gradient accumulation and on the factor before the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..analysis.factors import Reading, near, readings, total_weight, weight, words
from ..evidence import Evidence
from ..finding import Finding
from ..trace import Record, Run, Trace, difference
from .base import Rule, count, some

SAME = 1e-3  # relative: far above rounding, far below the smallest factor of two


class AccumNeverResynced(Rule):
    """At every optimizer step the gradients of all micro-batches have been reduced.

    Why: with `set_requires_gradient_sync(False)` FSDP keeps unreduced gradients aside. If the last micro-batch does
    not turn it on again, every sharded `.grad` is None and the step changes nothing; if only some backward is synced,
    the rest leaks into the next step.
    Wrong:
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros))  # never true: the last index is len - 1
            loss_of(model, micro).backward()
        optimizer.step()
    Right:
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros) - 1)
            loss_of(model, micro).backward()
        optimizer.step()
    Mend: Set the flag before every micro-batch, to whether it is the last one of this step, and step only after a
    synced backward.
    Source: pytorch PR#118298 (review); FSDP2 has no `no_sync`, see `FSDPModule.set_requires_gradient_sync`.
    Torch: run on 2.13.0.
    """

    name = "accum-never-resynced"
    family = "gradients"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        for record in (record for trace in run.traces for record in trace.of("step")):
            # Other optimizers may step later, when the gradients of their own parameters have been reduced.
            lost = [name for name in record["unsynced"] if name in record["held"]]
            if lost and record["step"] <= run.steps():
                empty = [n for n in lost if record["grads_at_step"].get(n) is None]
                state = "have no gradient at all" if empty else "lack that part of their gradient"
                return self.failed(
                    f"at step {record['step']} FSDP still holds unreduced gradients of {count(len(lost), 'parameter')} "
                    f"({some(lost)}), which {state} in the optimizer",
                    evidence.line_of(run, "sync", last=True) or record["at_line"],
                )
        flags = len(run.traces[0].of("sync"))
        return self.passed(f"no unreduced gradient at {count(run.steps(), 'step')} ({count(flags, 'sync flag')} seen)")


class UnsyncedGradsSurviveZeroGrad(Rule):
    """When gradients are thrown away, FSDP holds none that are not yet reduced.

    Why: gradients of backwards without sync lie in FSDP's unsharded parameters, where `zero_grad` does not look. If an
    accumulation window is given up (the epoch ends inside it, a step is skipped, an error is caught), they stay and
    are added to the next window's.
    Wrong:
        for i, micro in enumerate(micros):
            last = (i + 1) % accumulation_steps == 0  # the epoch's last window may be short, and has no last one
            model.set_requires_gradient_sync(last)
            loss_of(model, micro).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()  # clears nothing of the short window
    Right:
        for i, micro in enumerate(micros):
            last = (i + 1) % accumulation_steps == 0 or i + 1 == len(micros)
            model.set_requires_gradient_sync(last)
            loss_of(model, micro).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    Mend: Sync on the last micro-batch of the epoch too, or drop an incomplete window before its first backward. To give
    up a window that has begun, call `model.reset_iter_state()` (torch 2.13) besides `zero_grad()`.
    Source: measured (a relative error of 1.02 in the next gradient); the docstring of `FSDPModule.reset_iter_state`.
    Torch: run on 2.13.0.
    """

    name = "unsynced-grads-survive-zero-grad"
    family = "gradients"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        for trace in run.traces:
            if (left := _leaked(trace)) is not None:
                return self.failed(
                    f"before step {left['step']} `zero_grad` was called while FSDP held unreduced gradients of "
                    f"{count(len(left['unsynced']), 'parameter')} ({some(left['unsynced'])}): they stayed and are part of the next step",
                    left["at_line"],
                )
        return self.passed("no `zero_grad` left unreduced gradients behind")


def _leaked(trace: Trace) -> Record | None:
    """The first `zero_grad` that left unreduced gradients for a later step.

    What was unreduced at the step before it already is the fault of that step, and of accum-never-resynced.
    """
    left: Record | None = None
    known: set[str] = set()
    for record in trace.records:
        kind = record["kind"]
        if kind == "step" and left is not None:
            return left
        if kind == "step":
            known = set(record["unsynced"])
        elif kind == "micro":
            known = set()
        elif kind == "zeroed" and left is None and not known.issuperset(record["unsynced"]):
            left = record
        elif kind == "discarded":
            left = None
    return None


class ZeroGradWhileUnsharded(Rule):
    """`model.zero_grad()` clears the gradients that the optimizer uses.

    Why: between forward and backward some groups are unsharded (the root always, the others with
    `reshard_after_forward=False`). `model.parameters()` then returns temporary tensors, and `model.zero_grad()` clears
    theirs: the gradients of embedding, norm and head pile up from step to step, those of the blocks do not.
    Wrong:
        loss = loss_of(model, batch)
        model.zero_grad()  # the root group is unsharded here
        loss.backward()
        optimizer.step()
    Right:
        loss = loss_of(model, batch)
        optimizer.zero_grad()  # the optimizer holds the sharded parameters
        loss.backward()
        optimizer.step()
    Mend: Call `optimizer.zero_grad()`, or `model.zero_grad()` before the forward.
    Source: measured: the gradient norm of a small model was 3.5 times too large in step 5.
    Torch: run on 2.13.0.
    """

    name = "zero-grad-while-unsharded"
    family = "gradients"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        for trace in run.traces:
            left = trace.first("not_cleared")
            if left is not None and any(r["seq"] > left["seq"] for r in trace.of("step")):
                return self.failed(
                    f"`zero_grad` of the model left the gradients of {count(len(left['names']), 'parameter')} "
                    f"({some(left['names'])}) as they were: their groups were unsharded at that moment",
                    left["at_line"],
                )
        return self.passed("no `zero_grad` of a model left a gradient")


class DoubleOrMissingWorldScale(Rule):
    """The gradient is not off by the world size or by the number of micro-batches.

    Why: FSDP averages over ranks. Dividing the loss by the world size averages twice; not dividing it by the number
    of micro-batches averages too little; `set_gradient_divide_factor` does not recurse. AdamW hides any constant
    factor in the loss curve, and so does an active clip; weight decay, SGD and the clip threshold do not.
    Wrong:
        loss = loss_of(model, batch) / dist.get_world_size()  # FSDP averages over ranks already
        loss.backward()
    Right:
        loss = loss_of(model, batch) / accumulation_steps
        loss.backward()
    Mend: Backward through the mean loss of the micro-batch divided by the number of micro-batches of the step; FSDP
    averages over ranks.
    Source: pytorch/torchtitan#2318; meta-pytorch/torchtune PR#2172; the docstring of `set_gradient_divide_factor`.
    Torch: run on 2.13.0.
    """

    name = "double-or-missing-world-scale"
    family = "gradients"
    needs = frozenset({"train", "exact", "reference", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.exact
        if run is None or run.steps() == 0:
            return self.unknown(evidence.missing.get("exact", "no optimizer step was seen"))
        told: list[str] = []
        for oracle, label in ((evidence.single, "one process"), (evidence.reference, "DDP")):
            if oracle is None or oracle.steps() == 0 or oracle.global_batch(1) != run.global_batch(1):
                continue
            for field, name, ratio in _ratios(run, oracle):
                if found := readings(ratio, run, oracle):
                    line, where = _scaled_at(evidence, run, field, ratio, found)
                    return self.failed(
                        f"the gradient of {name} is {ratio:.4g} times that of {label} on the same batch, {words(found)}; {where}",
                        line,
                        measured=ratio,
                        limit=1.0,
                    )
            told.append(label)
        total = total_weight(run) if "one process" not in told else None
        if total is not None:
            if found := readings(total, run):
                line, where = _scaled_at(evidence, run, "grads", total, found)
                return self.failed(
                    f"the losses that went into backward add up to {total:.4g} times the mean cross entropy of the step, "
                    f"{words(found)}; {where}",
                    line,
                    measured=total,
                    limit=1.0,
                )
            told.append("the mean cross entropy")
        if not told:
            return self.unknown("no oracle saw the same batch, and no cross entropy was computed")
        return self.passed(f"no factor between the gradients and those of {' and '.join(told)}")


class RecomputeDrawsAnew(Rule):
    """A forward that activation checkpointing recomputes draws the random numbers of the first forward.

    Why: with `preserve_rng_state=False` every dropout of the recompute has a new mask, so the gradient is that of
    another function than the one whose loss was computed. Nothing is raised and the loss still falls.
    Wrong:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:  # which have dropout
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    Right:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
    Mend: Leave `preserve_rng_state` at True (its default) wherever the checkpointed part has dropout. If a library sets
    it, turn its activation checkpointing off and checkpoint the blocks yourself, or set the dropout to 0.
    Source: allenai/OLMo-core PR#828; allenai/OLMo PR#702; pytorch/torchtitan#1323; measured on accelerate 1.15.0
    (`fsdp2_apply_ac`).
    Torch: run on 2.13.0.
    """

    name = "recompute-draws-anew"
    family = "gradients"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        seen = [record for trace in run.traces for record in trace.of("recompute")]
        for record in seen:
            if not record["same"]:
                return self.failed(
                    f"a recomputed forward met other random numbers than the first one (dropout in {record['place']}): "
                    "its gradient is that of other masks than its loss",
                    record["at_line"],
                )
        if seen:
            return self.passed(f"dropout in {seen[0]['place']} is recomputed with the random numbers of the forward")
        return self.passed("no dropout was recomputed in a backward")


class TokenMeanOfMeans(Rule):
    """The loss of a step is the mean over all its targets, not a mean of means.

    Why: with ignored targets (`ignore_index`, padding) micro-batches and ranks hold different numbers of targets. If
    each divides by its own, a target in a short micro-batch weighs more than one in a long one. DDP does exactly the
    same, so parity with DDP shows nothing.
    Wrong:
        loss = F.cross_entropy(logits, targets, ignore_index=-100) / accumulation_steps
        loss.backward()
    Right:
        total = (targets != -100).sum()  # over all micro-batches of the step
        dist.all_reduce(total)
        loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") * dist.get_world_size() / total
        loss.backward()
    Mend: Sum the loss, divide by the number of targets of the whole step over all ranks (one all-reduce), multiply by
    the world size.
    Source: pytorch/torchtitan PR#1803; meta-pytorch/torchtune PR#2172.
    Torch: run on 2.13.0.
    """

    name = "token-mean-of-means"
    family = "gradients"
    needs = frozenset({"train", "exact", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.exact
        if run is None or run.steps() == 0:
            return self.unknown(evidence.missing.get("exact", "no optimizer step was seen"))
        seen = 0
        for step in range(1, run.steps() + 1):
            weights = [w for micros in run.micros(step) for m in micros if (w := weight(m)) is not None]
            if len(weights) != sum(len(micros) for micros in run.micros(step)) or not weights:
                continue
            seen += 1
            counts = [valid for _, valid in weights]
            per_target = [weight / valid for weight, valid in weights]
            if max(counts) == min(counts) or _spread(per_target) <= SAME:
                continue
            worst = _spread(per_target)
            return self.failed(
                f"at step {step} micro-batches of {min(counts)} to {max(counts)} targets are weighed so that a target counts up to "
                f"{1.0 + worst:.3g} times as much in one as in another",
                evidence.line_of(run, "micro"),
                measured=worst,
                limit=SAME,
            )
        if seen:
            return self.passed(f"every target weighs the same in each of {count(seen, 'step')}")
        if evidence.single is not None and evidence.single.global_batch(1) == run.global_batch(1):
            return self.passed("no cross entropy was seen; the comparison with one process on the whole batch decides")
        return self.unknown("no cross entropy was seen and no single process ran the same batch")


def _scaled_at(
    evidence: Evidence, run: Run, field: str, ratio: float, found: list[Reading]
) -> tuple[Record | None, str]:
    """(line, where that is) of what scales the gradients, as far as the records show it."""
    for record in reversed(list(run.places("divide")) if all(r.cause == "ranks" for r in found) else []):
        factor = len(run.data_ranks) / float(record["factor"])
        if near(ratio, factor):
            return record["at_line"], "`set_gradient_divide_factor` is called here"
        if near(ratio, 1.0 / factor):
            return record["at_line"], "`set_gradient_divide_factor`, called here, does not reach this parameter's group"
    if field == "grads_at_step":
        return evidence.line_of(run, "step"), "the gradients are scaled between backward and this line"
    return evidence.line_of(run, "micro"), "the scale is applied at this backward or before it"


def _ratios(run: Run, oracle: Run) -> Iterator[tuple[str, str, float]]:
    """(field, parameter, factor) wherever the first gradient is a multiple of the oracle's, at backward or at the step."""
    for field in ("grads", "grads_at_step"):
        mine, theirs = run.whole("step", field, 1), oracle.whole("step", field, 1)
        for name, a in mine.items():
            b = theirs.get(name)
            if a is None or b is None or a[0] <= 0.0 or b[0] <= 0.0:
                continue
            ratio = math.sqrt(a[0] / b[0])
            if difference(a, [ratio * x for x in b]) <= SAME * math.sqrt(a[0]):
                yield field, name, ratio


def _spread(values: list[float]) -> float:
    return max(values) / min(values) - 1.0 if min(values) > 0 else math.inf


RULES = (
    AccumNeverResynced,
    UnsyncedGradsSurviveZeroGrad,
    ZeroGradWhileUnsharded,
    DoubleOrMissingWorldScale,
    TokenMeanOfMeans,
    RecomputeDrawsAnew,
)
