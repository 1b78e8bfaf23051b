"""Rules that compare whole trajectories with an oracle. Tolerances come from the envelope run, see `comparison.py`."""

from __future__ import annotations

from dataclasses import replace

from ..analysis.scaling import clip_was_reached
from ..comparison import Comparison, Limits, compare, gradient_apart, incomparable, limits, undecided
from ..evidence import Evidence
from ..finding import Finding
from ..localise import meaning, part
from ..trace import Run
from .base import Rule, count, some
from .precision import low_precision

UNREPRODUCIBLE = 0.05
LOW_MULTIPLE = 4.0  # activations are rounded too, not only weights
LOW_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class MatchesDdp(Rule):
    """The script computes what it computes when DDP takes the place of `fully_shard`.

    Why: FSDP2 changes where tensors lie, not what is computed. Losses, gradient norms, every first gradient and the
    weights after the last step must agree with data parallelism on whole tensors, up to the order of a sum.
    Wrong:
        for p in model.parameters():
            if p.ndim == 2:  # the mean over one rank's rows, another one on every rank
                grad = p.grad.to_local()
                grad.sub_(grad.mean(dim=0, keepdim=True))
    Right:
        for p in model.parameters():
            if p.ndim == 2:
                p.grad = p.grad - p.grad.mean(dim=0, keepdim=True)
    Mend: Compute anything that needs a whole tensor on the DTensor (then `full_tensor()`), never on `to_local()`.
    Source: `torch.nn.parallel.DistributedDataParallel` run on the same script by the probe's stand-in.
    Torch: run on 2.13.0.
    """

    name = "matches-ddp"
    family = "parity"
    names_a_cause = False
    needs = frozenset({"train", "exact", "reference", "envelope", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        found = _judge(self, evidence, evidence.reference, "reference", "DDP")
        if (prevented := evidence.missing.get("ddp")) is not None:
            told = found.evidence.replace("as DDP", "as each rank with the whole model and gradients averaged", 1)
            told = told.replace(
                "not what DDP computes", "not what ranks with the whole model and averaged gradients compute", 1
            )
            found = replace(found, evidence=f"{told} (DDP cannot stand in: {prevented})")
        return self._by_one_process(evidence, found) if found.status == "fail" else found

    def _by_one_process(self, evidence: Evidence, found: Finding) -> Finding:
        """A difference from DDP is a fault only where one process differs too: code on shards has no counterpart in DDP."""
        other = MatchesSingleProcess().judge(evidence)
        shard_code = evidence.line_of(evidence.reference, "local")
        if other.status == "fail" or (other.status == "inconclusive" and shard_code is None):
            return found
        where = "the script does what DDP has no counterpart for"
        if shard_code is not None:
            line = f"{shard_code['file'].rpartition('/')[2]}:{shard_code['line']}"
            where = f"{line} works on local shards, for which DDP has no counterpart"
        if other.status == "inconclusive":
            return self.unknown(f"{where}, and one process does not tell either: {other.evidence}")
        return self.passed(
            f"{where}; decided by one process: {other.evidence}", measured=other.measured, limit=other.limit
        )


class MatchesSingleProcess(Rule):
    """The script computes what one process computes on the whole global batch.

    Why: DDP shares every fault of the script itself: a mean of means, a split that loses samples, a statistic over
    the local batch only. One process with the same global batch shares none of them.
    Wrong:
        similarity = image @ text.T  # negatives from this rank's samples only
        loss = F.cross_entropy(similarity, torch.arange(len(image)))
    Right:
        everyone = torch.distributed.nn.functional.all_gather(text)
        similarity = image @ torch.cat(everyone).T
        start = dist.get_rank() * len(image)
        loss = F.cross_entropy(similarity, torch.arange(start, start + len(image)))
    Mend: Make the loss of a step a function of the global batch: divide by global counts, gather what samples need
    from each other.
    Source: the same script at world size 1 without FSDP. pytorch/torchtitan PR#1803 for the token form.
    Torch: run on 2.13.0.
    """

    name = "matches-single-process"
    family = "parity"
    names_a_cause = False
    needs = frozenset({"train", "exact", "reference", "envelope", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.exact, evidence.single
        if run is not None and single is not None and run.steps() and single.steps():
            mine, theirs = run.global_batch(1), single.global_batch(1)
            if mine.total() != theirs.total():
                return self.unknown(
                    f"one process takes {count(theirs.total(), 'sample')} a step and {run.world_size} ranks take {mine.total()}: "
                    "the script does not keep its global batch, so there is nothing to compare (--single-args may tell it to)"
                )
        return _judge(self, evidence, single, "single", "one process")


class MatchesOriginal(Rule):
    """The script computes what the script that it was converted from computes.

    Why: DDP, one process and the converted script share whatever the conversion lost: a learning rate, a parameter
    group, a clip, a dropout rate, a schedule that counts micro-batches. Only the original has it.
    Wrong:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # the original decays no norms and biases
    Right:
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
    Mend: Compare optimizer, parameter groups, schedule, clipping and loss with those of the original, line by line.
    Source: the original script, run as it is (`--reference "SCRIPT ARGS"`), from the same weights.
    Torch: run on 2.13.0.
    """

    name = "matches-original"
    family = "parity"
    names_a_cause = False
    needs = frozenset({"train", "exact", "reference", "envelope", "single", "original"})

    def judge(self, evidence: Evidence) -> Finding:
        original, run = evidence.original, evidence.exact
        if original is None and evidence.train is not None and "original" not in evidence.missing:
            return self.passed("no script was named that this one was converted from (--reference)")
        if original is not None and run is not None and original.steps() and run.steps():
            theirs, mine = original.global_batch(1), run.global_batch(1)
            if theirs.total() != mine.total():
                return self.unknown(
                    f"the original takes {count(theirs.total(), 'sample')} a step and this script {mine.total()}: "
                    "give both the same global batch"
                )
        return _judge(self, evidence, original, "original", "the original")


class MatchesFullPrecision(Rule):
    """In low precision the first gradient is that of float32, up to what the rounding of the weights alone does.

    Why: bfloat16 and float16 are for matrix products. Positions, time steps, running sums, small differences and
    losses that are computed in them inside a module are silently wrong: in bfloat16 257 is 256, and an angle of 500
    is off by one. The comparisons with DDP and one process are made in float32 and cannot see it.
    Wrong:
        position = torch.arange(1024).to(torch.bfloat16)  # 1, 2, ... 256, 256, 258, 260, 260
        angle = position[:, None] * torch.logspace(0, -4, 8, dtype=torch.bfloat16)
        table = angle.sin()
    Right:
        position = torch.arange(1024, dtype=torch.float32)
        angle = position[:, None] * torch.logspace(0, -4, 8)
        table = angle.sin().to(torch.bfloat16)
    Mend: Compute positions, angles, sums over many elements, softmax statistics and the loss in float32, and cast the
    result.
    Source: the script without mixed precision, on the same weights and samples; the limit is measured with weights
    rounded to the script's dtype. Near huggingface/transformers#29496.
    Torch: run on 2.13.0.
    """

    name = "matches-full-precision"
    family = "parity"
    names_a_cause = False
    needs = frozenset({"train", "exact", "rounded"})

    def judge(self, evidence: Evidence) -> Finding:
        train, exact = evidence.train, evidence.exact
        if train is None or train.steps() == 0 or exact is None:
            return self.unknown(evidence.missing.get("exact", "no optimizer step was seen"))
        dtype = low_precision(train)
        if dtype is None:
            return self.passed("the script computes in the dtype of its weights")
        low, rounded = evidence.plain, evidence.rounded
        for run, role in ((low, "undropped"), (exact, "exact"), (rounded, "rounded")):
            if run is None or run.steps() == 0:
                return self.unknown(f"the {role} run made no step")
            if run.global_batch(1) != exact.global_batch(1):
                return self.unknown(
                    f"the {role} run took its first step on other samples (a loss scaler that skips a step does that)"
                )
        assert low is not None and rounded is not None
        measured, worst = gradient_apart(low, exact)
        noise, _ = gradient_apart(rounded, exact)
        limit = evidence.times(self.name) * (LOW_MULTIPLE * noise + 2.0 * LOW_UNIT[dtype])
        if measured <= limit:
            return self.passed(
                f"the first gradient in {dtype} is within {measured:.1e} of float32; rounded weights give {noise:.1e}",
                measured=measured,
                limit=limit,
            )
        return self.failed(
            f"the first gradient in {dtype} is {measured:.1%} off that of float32, and weights rounded to {dtype} explain {noise:.1%}; "
            f"most in {some(worst)}",
            evidence.line_of(train, "micro"),
            measured=measured,
            limit=limit,
        )


def _judge(rule: Rule, evidence: Evidence, oracle: Run | None, role: str, label: str) -> Finding:
    """Compare the exact run with one oracle."""
    run = evidence.exact
    if run is None or not run.completed:
        return rule.unknown(evidence.missing.get("exact", "the train run did not complete"))
    if oracle is None:
        return rule.unknown(evidence.missing.get(role, f"no {role} run was made"))
    if (reason := incomparable(run, oracle, role, label)) is not None:
        return rule.unknown(reason)
    found = compare(run, oracle)
    if found.update_size == 0.0:
        return rule.unknown("no weight moved in any step, so equal weights prove nothing")
    if not found.finite:
        return rule.unknown("losses or gradients are not finite")
    losses = [loss for loss in oracle.losses if loss is not None]
    if not oracle.downhill() and losses and losses[-1] >= losses[0]:
        return rule.unknown(
            "the loss did not fall and the updates do not point downhill: equal runs that learn nothing prove nothing"
        )
    allowed = limits(evidence, rule.name)
    if allowed.noise > UNREPRODUCIBLE:
        return rule.unknown(
            f"weights one unit in the last place apart give losses {allowed.noise:.0%} apart: the script is not reproducible enough"
        )
    return _decide(rule, evidence, run, oracle, found, allowed, label)


def _decide(
    rule: Rule,
    evidence: Evidence,
    run: Run,
    oracle: Run,
    found: Comparison,
    limit: Limits,
    label: str,
) -> Finding:
    measures, allowed = found.measures, limit.allowed
    over = {name: value for name, value in measures.items() if not value <= allowed[name]}
    if not over:
        name = max(measures, key=lambda n: measures[n] / allowed[n])
        told = (
            f"{count(min(run.steps(), oracle.steps()), 'step')} as {label}: loss within {found.loss:.1e}, "
            f"gradient norm {found.grad_norm:.1e}, update {found.update:.1e}; {substance(evidence, run)}"
        )
        return rule.passed(told, measured=measures[name], limit=allowed[name])
    name = max(over, key=lambda n: over[n] / allowed[n])
    if not limit.differ(measures):
        return rule.unknown(f"against {label}: {undecided(name, over[name], limit)}")
    told = "; ".join(f"{n} differs by {v:.2g} (allowed {allowed[n]:.1g})" for n, v in over.items())
    parting = part(run, oracle, allowed)
    same = None if label == "the original" else oracle
    told += f"; {meaning(parting, run, label, _second(evidence, run, label, limit), same)}"
    line = evidence.line_of(run, "micro" if parting.stage in ("gradient", "loss") else "step")
    return rule.failed(f"not what {label} computes: {told}", line, measured=over[name], limit=allowed[name])


def _second(evidence: Evidence, run: Run, label: str, limit: Limits) -> str | None:
    """What the other oracle says of the run: "agrees", "differs", or None where it cannot tell."""
    if label == "the original":  # it alone knows what the conversion has lost
        return None
    if label == "DDP":
        other, role, name = evidence.single, "single", "one process"
    else:
        other, role, name = evidence.reference, "reference", "DDP"
    if other is None or incomparable(run, other, role, name) is not None:
        return None
    measures = compare(run, other).measures
    return "agrees" if limit.agree(measures) else "differs" if limit.differ(measures) else None


def substance(evidence: Evidence, run: Run) -> str:
    """What makes the pass more than luck: the loss fell, gradients and weights moved, the clip was reached, the data differ."""
    losses = [loss for loss in run.losses if loss is not None]
    told = [f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"] if len(losses) > 1 else []
    trainable = [name for name, entries in run.parameters.items() if entries[0]["trainable"]]
    steps = range(1, run.steps() + 1)
    fed = {n for s in steps for n, g in run.whole("step", "grads_at_step", s).items() if g is not None and g[0] > 0.0}
    idle = [name for name in trainable if name not in fed]
    told.append(
        f"{some(idle)} never got a gradient" if idle else f"all {len(trainable)} trainable parameters got gradients"
    )
    moved = {n for s in steps for r in run.at_step("stepped", s) for n, m in r["moved"].items() if m[0] > 0.0}
    still = [name for name in trainable if name not in moved and name not in idle]
    if still:
        told.append(f"{some(still)} did not move")
    if _clips(evidence.provoked) or (evidence.train is not None and clip_was_reached(evidence.train)):
        reached = any(
            (a := run.grad_norm(s)) is not None
            and (b := run.grad_norm(s, "grads_at_step")) is not None
            and b < 0.999 * a
            for s in steps
        )
        told.append("the clip was reached" if reached else "the clip was never reached in these steps")
    if run.world_size > 1 and any(rows := run.rows(1)) and all(r == rows[0] for r in rows):
        told.append("all ranks saw the same samples")
    return ", ".join(told)


def _clips(provoked: Run | None) -> bool:
    """Whether gradients 1e6 times as large were scaled down before the step."""
    record = provoked.traces[0].first("stress") if provoked is not None and provoked.traces else None
    return record is not None and any(ss < 0.9 * bb for bb, _, ss in record["products"].values() if bb > 0.0)


RULES = (MatchesDdp, MatchesSingleProcess, MatchesOriginal, MatchesFullPrecision)
