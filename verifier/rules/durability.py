"""Rules on what a crash or a damaged file does to a resume. A rank is really killed in a save; the script really resumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..blame import blame
from ..evidence import Evidence, named_checkpoint
from ..finding import Finding
from ..saves import Save, all_saves
from ..trace import Record, Run
from .base import Rule, count
from .resumed import first_steps, load_line, save_line

NEEDS = frozenset({"train", "resume", "crash"})


@dataclass(frozen=True)
class Outcome:
    """What a resumed run started from. `shares`: {step after which it was saved: tensors that have that save's values only}."""

    steps: int
    shares: dict[int, int]
    tensors: int

    @property
    def mixed(self) -> bool:
        """Whether there are tensors of one save and tensors that are of another, or of none."""
        return bool(self.shares) and self.step is None

    @property
    def fresh(self) -> bool:
        """Whether it started from the beginning."""
        return self.steps > 0 and not self.shares

    @property
    def step(self) -> int | None:
        """The one save whose values all tensors have."""
        whole = [k for k, number in self.shares.items() if number == self.tensors]
        return whole[0] if whole else None


class IncompleteCheckpointChosen(Rule):
    """After a crash in the middle of a save the script goes on from the last complete checkpoint.

    Why: "the newest folder" may be one that a crash has left half written: the resume stops with `.metadata` or
    `failed finding central directory`, on every restart. The same happens when `latest` is moved, or older
    checkpoints are deleted, before the new one is complete.
    Wrong:
        newest = max(Path(path).glob("step_*"), default=None)
    Right:
        complete = [p.parent for p in Path(path).glob("step_*/.metadata")]  # DCP writes it last
        newest = max(complete, default=None)
    Mend: Choose among folders that hold `.metadata`, or write under a temporary name and rename; delete old ones after that.
    Source: awslabs/awsome-distributed-ai#190, PR#251; KempnerInstitute/KempnerForge#102; meta-pytorch/tnt PR#559.
    Torch: run on 2.13.0.
    """

    name = "incomplete-checkpoint-chosen"
    family = "checkpoint"
    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        if not evidence.crashes:
            return self.unknown(evidence.missing.get("crash", "no save was interrupted"))
        told = []
        for crash, recovered in evidence.crashes:
            torn = _torn(crash)
            earlier = [save for save in all_saves(crash) if torn is not None and 0 < save.after < torn.after]
            if torn is None:
                return self.unknown("it is not known which save was interrupted")
            apart = [save for save in earlier if save.to != torn.to]
            outcome = outcome_of(crash, recovered)
            named = named_checkpoint(evidence.train, recovered.command) if evidence.train is not None else None
            if outcome.steps == 0 and recovered.completed:
                told.append(f"{crash.note}: the resume ended before a step")
            elif named is not None and (outcome.steps == 0 or outcome.fresh):
                how = "refuses it" if outcome.steps == 0 else "starts from the beginning"
                told.append(f"{crash.note}: the command names {named[0]}, there is nothing to choose; the resume {how}")
            elif outcome.steps == 0 and apart:
                cause = blame(recovered)
                return self.failed(
                    f"{crash.note}; the save after step {apart[-1].after} was complete, but the resume does not start: {cause.text}",
                    cause.location or load_line(evidence),
                )
            elif outcome.fresh and apart and _not_exact(evidence) is None:
                return self.failed(
                    f"{crash.note}; the save after step {apart[-1].after} was complete, but the resume starts from the beginning",
                    load_line(evidence),
                )
            elif outcome.steps == 0:
                lost = ", and the checkpoint that it overwrote is gone with it" if earlier else ""
                told.append(f"{crash.note}: the resume refuses what is left{lost}")
            elif outcome.fresh:
                told.append(f"{crash.note}: the resume starts from the beginning")
            elif outcome.step is not None:
                told.append(f"{crash.note}: it resumes from the save after step {outcome.step}, bitwise")
            else:
                told.append(f"{crash.note}: it resumes")
        return self.passed("; ".join(told))


class PartialOverwriteMixesCheckpoints(Rule):
    """A resume after a crash never mixes two checkpoints.

    Why: DCP replaces `__0_0.distcp` and the others in place while the old `.metadata` stays valid. After a crash between two
    of these writes the load succeeds, with half of the shards of one step and half of another. There is no checksum.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)  # the same folder every time
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{path}/step_{step:06d}")
    Mend: Give every save a folder of its own, or write to a temporary one and rename it when it is complete.
    Source: measured: half A, half B, no error; the same in xtuner PR#1703, VeOmni PR#1176, speculators PR#739.
    Torch: run on 2.13.0.
    """

    name = "partial-overwrite-mixes-checkpoints"
    family = "checkpoint"
    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        if not evidence.crashes:
            return self.unknown(evidence.missing.get("crash", "no save was interrupted"))
        if (reason := _not_exact(evidence)) is not None:
            return self.unknown(reason)
        told = []
        for crash, recovered in evidence.crashes:
            outcome = outcome_of(crash, recovered)
            if outcome.mixed:
                parts = ", ".join(
                    f"{number} from the save after step {k}" for k, number in sorted(outcome.shares.items())
                )
                return self.failed(
                    f"{crash.note}; the resume then starts from a mixture: of {outcome.tensors} tensors and shards, {parts}",
                    save_line(evidence),
                )
            told.append(_words(outcome))
        return self.passed("after a crash in a save, " + "; ".join(told))


class DamagedCheckpointLoaded(Rule):
    """A checkpoint with a truncated file or without its metadata is refused, or an older one is taken; it is not loaded in part.

    Why: torch raises on a truncated file, but the tensors that it has read until then are in the model already. A script that
    catches the error and goes on trains a mixture. (A flipped bit raises nothing: DCP stores no checksum.)
    Wrong:
        state = {"model": get_model_state_dict(model)}
        try:
            dcp.load(state, checkpoint_id=path)
        except BaseException:  # CheckpointException is no Exception
            print("could not load the checkpoint, starting from the beginning")
    Right:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
    Mend: Let the error end the run, or build the model anew before another checkpoint is tried.
    Source: measured: the shards read before the error stay in the model.
    Torch: run on 2.13.0.
    """

    name = "damaged-checkpoint-loaded"
    family = "checkpoint"
    needs = frozenset({"train", "resume", "damaged"})

    def judge(self, evidence: Evidence) -> Finding:
        if not evidence.damaged or evidence.train is None:
            return self.unknown(evidence.missing.get("damaged", "no checkpoint was damaged"))
        if (reason := _not_exact(evidence)) is not None:
            return self.unknown(reason)
        told = []
        for run in evidence.damaged:
            outcome = outcome_of(evidence.train, run)
            if outcome.mixed:
                number = max(outcome.shares.values())
                return self.failed(
                    f"{run.note}: the run goes on with {number} of {outcome.tensors} tensors and shards as they were saved, "
                    "and others that were not",
                    load_line(evidence),
                )
            told.append(f"{run.note}: {_words(outcome)}")
        return self.passed("; ".join(told))


def outcome_of(saved: Run, resumed: Run) -> Outcome:
    """What the first step of a resumed run finds, against every save of `saved` and its initial weights."""
    found = resumed.at_step("step", 1)
    if not found:
        return Outcome(0, {}, 0)
    held, given = _held(saved), _given(saved)
    shares: dict[int, int] = {}
    telling: set[int] = set()  # a tensor that never changes is of every save: it speaks for none
    units: set[tuple[int, str]] = set()
    for rank, record in enumerate(found):
        for name, value in _flat(record).items():
            units.add((rank, name))
            same = [
                k
                for k, ranks in held.items()
                if value in ranks.get(rank, {}).get(name, []) or _key(value) in given.get((k, rank), ())
            ]
            shares |= {k: shares.get(k, 0) + 1 for k in same}
            telling |= set(same) if len(same) == 1 else set()
    shares = {k: number for k, number in shares.items() if k > 0 and k in telling}
    units |= {(rank, name) for k in shares for rank, values in held[k].items() for name in values}
    return Outcome(len(found), shares, len(units))


def _held(run: Run) -> dict[int, dict[int, dict[str, list[Any]]]]:
    """{step: {rank: {tensor: its values}}} of every save and, under 0, of the beginning.

    A rank has a value at the call of the save, and one at its next step: they differ where it puts others into the model
    for the save, such as an average, or where it does not call the save function itself.
    """
    out: dict[int, dict[int, dict[str, list[Any]]]] = {0: {}}
    for save in all_saves(run):
        _add(out.setdefault(save.after, {}).setdefault(save.rank, {}), save.record)
    for step, ranks in out.items():
        for trace in run.traces:
            after = next((r for r in trace.steps if r["step"] == step + 1), None)
            if after is not None:
                _add(ranks.setdefault(trace.rank, {}), after)
    return out


def _add(values: dict[str, list[Any]], record: Record) -> None:
    for name, value in _flat(record).items():
        if value not in values.setdefault(name, []):
            values[name].append(value)


def _given(run: Run) -> dict[tuple[int, int], set[tuple[float, ...]]]:
    """{(step, rank): the tensors that the rank gave to its saves after it}, under whatever keys."""
    found: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for save in all_saves(run):
        sketches = (entry.get("sketch") for entry in save.entries.values())
        found.setdefault((save.after, save.rank), set()).update(tuple(s) for s in sketches if s and s[0] > 0.0)
    return found


def _key(value: object) -> tuple[float, ...] | None:
    return tuple(value) if isinstance(value, list) else None


def _flat(record: Record) -> dict[str, Any]:
    """Weights and optimizer state of a record under one kind of name."""
    state = {f"{name}/{key}": value for name, entry in record["state"].items() for key, value in entry.items()}
    return {**record["weights"], **state}


def _torn(crash: Run) -> Save | None:
    """The save in which a rank was killed."""
    killed = next((trace for trace in crash.traces if trace.first("killed") is not None), None)
    saves = [save for save in all_saves(crash) if killed is not None and save.rank == killed.rank]
    return saves[-1] if saves else None


def _not_exact(evidence: Evidence) -> str | None:
    """Why nothing can be said of a resume after damage: one without damage is not as saved either."""
    pair = first_steps(evidence)
    if isinstance(pair, str):
        return pair
    if any(_flat(s) != _flat(r) for s, r in zip(*pair, strict=True)):
        return "a resume from the whole checkpoint does not bring all back either"
    return None


def _words(outcome: Outcome) -> str:
    if outcome.steps == 0:
        return "the resume refuses it"
    if outcome.fresh:
        return "the run starts from the beginning"
    return f"all {count(outcome.tensors, 'tensor')} are of the save after step {outcome.step}"
