"""Rules on what comes back from a checkpoint. They compare the resumed run's first step with the same step of the train run."""

from __future__ import annotations

from typing import Any

from ..evidence import Evidence
from ..finding import Finding
from ..saves import saves_of
from ..trace import Record, Run
from .base import Rule, count, some
from .checkpoint_loads import LenientLoadHidesMismatch, OptimTemplateWithGrads
from .checkpoint_opened import AsyncSaveStateRace, CheckpointHoldsWhatRanksHeld
from .checkpoint_saves import (
    AsyncSaveProcessGroup,
    FullStateDictOom,
    LocalShardExport,
    RankDependentCheckpointPath,
    Step0SaveAdvancesAdam,
    WrapperPrefixKeys,
)
from .durability import DamagedCheckpointLoaded, IncompleteCheckpointChosen, PartialOverwriteMixesCheckpoints
from .resumed import first_steps, load_line, saved_at

NEEDS = frozenset({"train", "resume"})


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
                if n in r["weights"] and s["weights"][n] != r["weights"][n]
            }
        )
        if not wrong:
            return self.passed(f"{count(len(saved[0]['weights']), 'parameter')} bitwise as saved")
        assert evidence.train is not None
        fresh = {n: e[0]["sketch"] for n, e in evidence.train.parameters.items()}
        initial = [n for n in wrong if resumed[0]["weights"].get(n) == fresh.get(n)]
        what = f"; {len(initial)} of them still have their initial values" if initial else ""
        told = f"{len(wrong)} of {len(saved[0]['weights'])} parameters ({some(wrong)})"
        if _not_in_the_save(evidence, saved[0], wrong):
            return self.failed(
                f"{told} are not what they were at the save, and are in no save: a model that is not in the checkpoint{what}"
                f"{saved_at(evidence)}",
                load_line(evidence),
                fix="Save and restore this model too, or build it so that it comes out the same in a resumed run.",
            )
        return self.failed(f"{told} are not what was saved{what}", load_line(evidence))


def _not_in_the_save(evidence: Evidence, before: Record, wrong: list[str]) -> bool:
    """Whether other weights of rank 0 are found among what it gave to the saves, and none of these."""
    given = {
        tuple(entry["sketch"])
        for record in evidence.train.traces[0].of("saving")  # type: ignore[union-attr]
        for entry in record["entries"].values()
        if entry.get("sketch")
    }
    found = {name for name, value in before["weights"].items() if tuple(value) in given}
    return bool(found) and not found & set(wrong)


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
        for later in range(resume.steps()):
            mine_, theirs_ = resume.at_step("step", 1 + later), train.at_step("step", step + later)
            if mine_ and theirs_ and mine_[0]["lr"] != theirs_[0]["lr"]:
                now, then = _list(mine_[0]["lr"]), _list(theirs_[0]["lr"])
                told.append(f"the learning rate of step {step + later} is {now} after the resume, {then} without")
                break
        theirs, mine = train.rows(step), resume.rows(1)
        if all(a != b for a, b in zip(theirs, mine, strict=True)):
            again = next(
                (k for k in range(1, train.steps() + 1) if train.global_batch(k) == resume.global_batch(1)), None
            )
            which = f"the samples of step {again} once more" if again else "other samples than an uninterrupted run"
            told.append(f"step {step} after the resume trains on {which}")
        if told:
            return self.failed("; ".join(told) + saved_at(evidence), load_line(evidence))
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
        if (found := _one_random_state(evidence.train)) is not None:
            key, line = found
            return self.failed(
                f"`{key}` is the random state of its rank on every rank; under one key only one is kept", line
            )
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
                        f"after the resume rank {rank} has the {what} of rank {owner} (step {step}){saved_at(evidence)}",
                        load_line(evidence),
                    )
        kept = [what for what, theirs, mine in kinds if theirs == mine]
        return self.passed(
            f"no rank has another's state after the resume ({' and '.join(kept) or 'neither'} restored on each)"
        )


def _one_random_state(run: Run | None) -> tuple[str, dict[str, Any] | None] | None:
    """(key, line) of a save by all ranks together that holds another generator state on each of them under one key."""
    ranks = [[save for save in saves_of(trace) if save.together] for trace in run.traces] if run is not None else []
    for saves in zip(*ranks, strict=False):
        for key, entry in saves[0].entries.items():
            mine = [save.entries.get(key, {}).get("sketch") for save in saves]
            states = [save.record["random"] for save in saves]
            if (
                entry.get("dtype") == "uint8"
                and None not in mine
                and mine == states
                and any(m != mine[0] for m in mine)
            ):
                return key, saves[0].line
    return None


def _random(run: Run, step: int) -> list[str | None]:
    return [next((m["random"] for m in micros), None) for micros in run.micros(step)]


def _list(values: list[float]) -> str:
    return ", ".join(f"{v:.6g}" for v in values)


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
