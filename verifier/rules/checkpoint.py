"""Rules on what comes back from a checkpoint. They compare the resumed run's first step with the same step of the train run."""

from __future__ import annotations

from typing import Any

from ..evidence import Evidence
from ..finding import Finding
from ..trace import Run
from .base import Rule, count, some
from .checkpoint_saves import (
    AsyncSaveProcessGroup,
    AsyncSaveStateRace,
    CheckpointHoldsWhatRanksHeld,
    FullStateDictOom,
    LocalShardExport,
    RankDependentCheckpointPath,
    Step0SaveAdvancesAdam,
    WrapperPrefixKeys,
)
from .durability import DamagedCheckpointLoaded, IncompleteCheckpointChosen, PartialOverwriteMixesCheckpoints
from .resumed import first_steps, load_line, save_line

NEEDS = frozenset({"train", "resume"})


class LenientLoadHidesMismatch(Rule):
    """A load that accepts missing keys finds all that the checkpoint has of the model.

    Why: `allow_partial_load=True` and `strict=False` turn a key error into silence. With a prefix too many on either side
    nothing is loaded, the model keeps its weights, and no line of the log says so.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        state = {"module": get_model_state_dict(model)}  # another prefix than the checkpoint's
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
    Mend: Load strictly and name the parts alike at save and load; where keys may be missing, list them and check that list.
    Source: measured on `DefaultLoadPlanner` and `StateDictOptions(strict=False)`; pytorch#192224, #192202.
    Torch: run on 2.13.0.
    """

    name = "lenient-load-hides-mismatch"
    family = "checkpoint"

    def judge(self, evidence: Evidence) -> Finding:
        runs = [run for run in (evidence.train, evidence.resume) if run is not None]
        if not runs:
            return self.unknown("the script was not run")
        loads = 0
        for run in runs:
            for record in (r for trace in run.traces[:1] for r in trace.of("lenient")):
                loads += 1
                pairs = _same_but_for_a_wrapper(record["names"], record["unused"])
                nothing = 0 < record["wanted"] == record["missing_count"] and record["unused_count"] > 0
                lost = (
                    _not_back(evidence, [*record["missing"], *(a for a, _ in pairs)]) if run is evidence.resume else []
                )
                if not lost and (run is evidence.resume or not (pairs or nothing)):
                    continue
                number = len(pairs) or record["missing_count"]
                told = f"{number} of {record['wanted']} keys were not found and {record['how']} hides it"
                if pairs:
                    told += f": `{pairs[0][0]}` is asked for, `{pairs[0][1]}` is there"
                elif nothing:
                    told += f": `{record['missing'][0]}` is asked for, there is `{record['unused'][0]}` and the like"
                else:
                    told += f": {some(lost)} came back with other values than were saved"
                return self.failed(told, record["at_line"])
        return self.passed(
            f"{count(loads, 'lenient load')}, of which none lost what the checkpoint has"
            if loads
            else "no lenient load"
        )


class OptimTemplateWithGrads(Rule):
    """The optimizer's state dict is taken when no gradient is there, or after a step.

    Why: torch's helpers create missing optimizer state for a template, unless any `.grad` exists: then they give back an
    empty state without a word, and the load that it is for restores nothing.
    Wrong:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        loss_of(model, batch).backward()  # a warm-up before the load
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}  # no entries for `dcp.load` to fill
    Right:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        loss_of(model, batch).backward()
        optimizer.zero_grad(set_to_none=True)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    Mend: Call `optimizer.zero_grad(set_to_none=True)` before the helper, or load before any backward.
    Source: pytorch#140898.
    Torch: run on 2.13.0.
    """

    name = "optim-template-with-grads"
    family = "checkpoint"

    def judge(self, evidence: Evidence) -> Finding:
        runs = [run for run in (evidence.train, evidence.resume) if run is not None]
        if not runs:
            return self.unknown("the script was not run")
        keeps = any(
            state for run in runs for trace in run.traces for r in trace.of("step") for state in r["state"].values()
        )
        taken = 0
        for run in runs:
            for trace in run.traces[:1]:
                for record in (r for r in trace.of("template") if r["optimizers"]):
                    taken += 1
                    if keeps and record["had_grads"] and not record["had_state"] and record["states"] == 0:
                        return self.failed(
                            f"{record['op']} gave 0 entries of optimizer state in the {run.role} run: gradients were there before any step",
                            record["at_line"],
                        )
        return self.passed(f"{count(taken, 'state dict')} of optimizers, none emptied by gradients")


class LoadWithoutSet(Rule):
    """After a resume the model has the weights that were saved.

    Why: `dcp.load` fills the dict that it is given. A full or copied state dict (`full_state_dict=True`, a clone, a
    CPU copy) is filled and forgotten unless it is set back: the model trains on from fresh weights.
    Wrong:
        options = StateDictOptions(full_state_dict=True)
        state = {"model": get_model_state_dict(model, options=options)}
        dcp.load(state, checkpoint_id=path)
    Right:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
    Mend: After `dcp.load`, call `set_model_state_dict` / `set_state_dict` with the loaded dict.
    Source: the DCP tutorial's pattern; pytorch#114299; RLinf PR#283.
    Torch: run on 2.13.0.
    """

    name = "load-without-set"
    family = "checkpoint"
    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        pair = first_steps(evidence)
        if isinstance(pair, str):
            return self.unknown(pair)
        saved, resumed = pair
        wrong = sorted(
            {
                n
                for s, r in zip(saved, resumed, strict=True)
                for n in s["weights"]
                if s["weights"][n] != r["weights"].get(n)
            }
        )
        if not wrong:
            return self.passed(f"{count(len(saved[0]['weights']), 'parameter')} bitwise as saved")
        assert evidence.train is not None
        fresh = {n: e[0]["sketch"] for n, e in evidence.train.parameters.items()}
        initial = [n for n in wrong if resumed[0]["weights"].get(n) == fresh.get(n)]
        what = f"; {len(initial)} of them still have their initial values" if initial else ""
        return self.failed(
            f"{len(wrong)} of {len(saved[0]['weights'])} parameters ({some(wrong)}) are not what was saved{what}",
            load_line(evidence),
        )


class OptimTemplateEmpty(Rule):
    """After a resume the optimizer has the state that was saved.

    Why: `dcp.load` reads only the keys of the dict that it is given, and the raw `state_dict()` of a new optimizer
    has no state keys. The moments start from zero without an error, and the first loss after the resume is still
    exact.
    Wrong:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # a new optimizer: no state to fill
        dcp.load(state, checkpoint_id=path)
        optimizer.load_state_dict(state["optimizer"])
    Right:
        model_state, optimizer_state = get_state_dict(model, optimizer)  # creates the state that load fills
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    Mend: Build the template with `get_state_dict(model, optimizer)` and give the loaded dict to `set_state_dict`.
    Source: meta-pytorch/torchtune#2553; pytorch#114299; measured: 16 entries saved, 0 restored, no error.
    Torch: run on 2.13.0.
    """

    name = "optim-template-empty"
    family = "checkpoint"
    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        pair = first_steps(evidence)
        if isinstance(pair, str):
            return self.unknown(pair)
        saved, resumed = pair
        had = {n for record in saved for n, state in record["state"].items() if state}
        if not had:
            return self.passed("the optimizer keeps no state")
        empty = sorted(n for n in had if all(not r["state"].get(n) for r in resumed))
        wrong = sorted(
            n for s, r in zip(saved, resumed, strict=True) for n in s["state"] if s["state"][n] != r["state"].get(n)
        )
        if not wrong:
            return self.passed(f"state of {count(len(had), 'parameter')} bitwise as saved")
        if empty:
            told = f"{len(empty)} of {len(had)} parameters ({some(empty)}) come back without any optimizer state"
        else:
            name = wrong[0]
            keys = [
                k for k, v in saved[0]["state"].get(name, {}).items() if resumed[0]["state"].get(name, {}).get(k) != v
            ]
            told = f"the optimizer state of {len(set(wrong))} of {len(had)} parameters is not what was saved ({name}: {some(keys)})"
        return self.failed(told, load_line(evidence))


class SchedulerOrProgressNotRestored(Rule):
    """After a resume the learning rate and the data go on where they stopped.

    Why: a checkpoint of model and optimizer alone restarts the schedule (a second warm-up, a learning rate that
    jumps) and the data: samples are seen twice, others never.
    Wrong:
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=path)
    Right:
        state = {"model": model_state, "optimizer": optimizer_state}
        state |= {"scheduler": scheduler.state_dict(), "samples": samples_seen}
        dcp.save(state, checkpoint_id=path)
    Mend: Save and restore the scheduler's state_dict, the step, and the data position (in global samples) with the
    model.
    Source: pytorch/torchtitan PR#275, #809; Modalities/modalities#315; pytorch#119168.
    Torch: run on 2.13.0.
    """

    name = "scheduler-or-progress-not-restored"
    family = "checkpoint"
    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        pair = first_steps(evidence)
        if isinstance(pair, str):
            return self.unknown(pair)
        saved, resumed = pair
        train, resume = evidence.train, evidence.resume
        assert train is not None and resume is not None
        step = saved[0]["step"]
        told = []
        if saved[0]["lr"] != resumed[0]["lr"]:
            told.append(
                f"the learning rate of step {step} is {_list(resumed[0]['lr'])} after the resume, {_list(saved[0]['lr'])} without"
            )
        theirs, mine = train.rows(step), resume.rows(1)
        if all(a != b for a, b in zip(theirs, mine, strict=True)):
            again = next(
                (k for k in range(1, train.steps() + 1) if train.global_batch(k) == resume.global_batch(1)), None
            )
            which = f"the samples of step {again} once more" if again else "other samples than an uninterrupted run"
            told.append(f"step {step} after the resume trains on {which}")
        if told:
            line = evidence.line_of(train, "checkpoint", op="save") or save_line(evidence)
            loaded = load_line(evidence)
            where = f" (loaded at line {loaded['line']} of {loaded['file'].rpartition('/')[2]})" if loaded else ""
            return self.failed("; ".join(told) + where, line)
        return self.passed(
            f"learning rate {_list(resumed[0]['lr'])} and the samples of step {step}, as without the interruption"
        )


class PerRankStateDeduplicated(Rule):
    """After a resume every rank has its own random state and data position, not another rank's.

    Why: DCP takes equal keys of plain tensors and objects on several ranks for replicas and stores one. A random
    state or a sampler position saved under one key comes back as one rank's on all: the same dropout masks, the same
    samples.
    Wrong:
        state = {"model": model_state, "rng": torch.get_rng_state()}  # one key, another value on every rank
        dcp.save(state, checkpoint_id=path)
    Right:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())  # the same list on every rank
        state = {"model": model_state, "rng": states}
        dcp.save(state, checkpoint_id=path)
    Mend: Save per-rank values as one gathered list (or under a key that holds the rank) and let each rank take its
    own entry.
    Source: pytorch#120356, #146566; NVIDIA/Megatron-LM PR#6858 (252 of 256 ranks wrong).
    Torch: run on 2.13.0.
    """

    name = "per-rank-state-deduplicated"
    family = "checkpoint"
    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        pair = first_steps(evidence)
        if isinstance(pair, str):
            return self.unknown(pair)
        train, resume = evidence.train, evidence.resume
        assert train is not None and resume is not None
        if train.world_size == 1:
            return self.unknown("one rank has one state")
        step = pair[0][0]["step"]
        kinds: list[tuple[str, list[Any], list[Any]]] = [
            ("random state", _random(train, step), _random(resume, 1)),
            ("samples", list(train.rows(step)), list(resume.rows(1))),
        ]
        for what, theirs, mine in kinds:
            for rank, value in enumerate(mine):
                owner = next((r for r, other in enumerate(theirs) if r != rank and other == value and other), None)
                if value != theirs[rank] and owner is not None:
                    return self.failed(
                        f"after the resume rank {rank} has the {what} of rank {owner} (step {step})",
                        save_line(evidence),
                    )
        kept = [what for what, theirs, mine in kinds if theirs == mine]
        return self.passed(
            f"no rank has another's state after the resume ({' and '.join(kept) or 'neither'} restored on each)"
        )


def _random(run: Run, step: int) -> list[str | None]:
    return [next((m["random"] for m in micros), None) for micros in run.micros(step)]


def _list(values: list[float]) -> str:
    return ", ".join(f"{v:.6g}" for v in values)


def _same_but_for_a_wrapper(asked: list[str], unused: list[str]) -> list[tuple[str, str]]:
    """Pairs of keys that are one name with another wrapper's prefix."""
    there = {_bare(key): key for key in unused}
    return [(key, there[bare]) for key in asked if (bare := _bare(key)) in there]


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _not_back(evidence: Evidence, missing: list[str]) -> list[str]:
    """Parameters of a resumed model that a lenient load did not find and that are not as they were saved."""
    pair = first_steps(evidence)
    if isinstance(pair, str):
        return []
    names = {n for s, r in zip(*pair, strict=True) for n in s["weights"] if s["weights"][n] != r["weights"].get(n)}
    return sorted(n for n in names if any(key == n or key.endswith("." + n) for key in missing))


_WRAPPERS = ("module", "_orig_mod", "model", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "state_dict", "net")

RULES = (
    RankDependentCheckpointPath,
    LocalShardExport,
    LenientLoadHidesMismatch,
    WrapperPrefixKeys,
    AsyncSaveProcessGroup,
    AsyncSaveStateRace,
    Step0SaveAdvancesAdam,
    LoadWithoutSet,
    OptimTemplateWithGrads,
    OptimTemplateEmpty,
    SchedulerOrProgressNotRestored,
    PerRankStateDeduplicated,
    FullStateDictOom,
    IncompleteCheckpointChosen,
    PartialOverwriteMixesCheckpoints,
    DamagedCheckpointLoaded,
    CheckpointHoldsWhatRanksHeld,
)
