"""What the runs show of a script's checkpoints: which saves can be resumed from, and where they
are.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from ..config.option import PLACE, Option, by_purpose
from ..evidence import LOADS, SAVES, Evidence, saves_of
from ..finding import Uncovered
from ..trace import Run
from ..trace.events import Checkpoint, Lenient, Saving, Step
from .saves import all_saves, final_path


def saves_after(run: Run, step: int) -> bool:
    """Whether a resume would start from a later checkpoint than that of step `step`."""
    saves = saves_of(run)
    # Where DCP saves exist, a torch.save beside them is an export or a side file: a resume starts
    # from the former.
    sharded = [r.after_step for r in saves if r.op != "torch.save"]
    return max(sharded or [r.after_step for r in saves], default=0) > step


def same_weights_after(first: Run, second: Run, step: int) -> bool:
    """Whether two runs hold bitwise the same weights before step `step + 1`."""
    mine, theirs = first.at_step(Step, step), second.at_step(Step, step)
    return bool(mine) and all(a.weights == b.weights for a, b in zip(mine, theirs, strict=True))


def saved_paths(run: Run, after: int | None = None) -> list[str]:
    """Where the saves of a run (those after step `after`) are at its end."""
    return sorted({final_path(run, s) for s in all_saves(run) if s.to and after in (None, s.after)})


def outside(run: Run, folder: str, known: Collection[str] = ()) -> str:
    """The first save that is neither in `folder` nor in a `known` path; "" if all are."""
    return next((p for p in saved_paths(run) if not _within(p, (folder, *known))), "")


def _within(path: str, folders: Collection[str]) -> bool:
    return (path + os.sep).startswith(tuple(folder + os.sep for folder in folders))


def loaded_before(
    run: Run, own: Collection[str], foreign: Callable[[str], bool] = lambda path: False
) -> str:
    """The message on a run that should start from scratch and loaded an earlier checkpoint; "" if
    it did not.

    `own` are the paths that this run has written. A file that is loaded, such as pretrained
    weights, is no checkpoint unless the run saves to the same folder; a folder of
    torch.distributed.checkpoint is one unless it saves elsewhere, or it is `foreign`: it reads
    pretrained safetensors, too.
    """
    homes = {str(Path(path).parent) for path in saved_paths(run)}
    for record in run.all(Checkpoint):
        path = record.to
        if record.op not in ("load", "torch.load") or not path or _within(path, own):
            continue
        if str(Path(path).parent) in homes or (
            # DCP also reads pretrained safetensors (a folder without.metadata): no checkpoint of an
            # earlier run (pretrained safetensors read by DCP (NeMo Automodel)).
            record.op == "load" and not homes and not foreign(path)
        ):
            return (
                f"the {run.role} run loaded {path}, which existed before this verification: the"
                " script resumes automatically from an earlier run. Move it away, or pass"
                " arguments that name an empty folder, such as {checkpoint}"
            )
    return ""


# Somebody gave --resume-args: then a run that saves nothing is a gap, never "not applicable", so
# that it cannot pass.
def no_checkpoint(evidence: Evidence) -> str:
    """Why rules on checkpoints do not apply: neither a run nor the sources save or load one.

    "" if they apply, or somebody says so.
    """
    train = evidence.train
    if (
        train is None
        or train.steps() == 0
        or evidence.saving is not None
        or evidence.course.resumes
    ):
        return ""
    used = any(
        r.op in (*SAVES, "load", "torch.load", "write", "read") for r in train.all(Checkpoint)
    )
    used = used or any(trace.first(Saving) or trace.first(Lenient) for trace in train.traces)
    return "" if used else "the script saves no checkpoint"


def own_files(evidence: Evidence) -> str:
    """Why no save can be interrupted and no checkpoint damaged: the script writes them in a format
    of its own. "" if it does not.
    """
    saves = saves_of(evidence.train) if evidence.train is not None else []
    # Files in a format of the script's own have no moment at which the probe can kill, and no
    # tensors that it can damage (trainings without gradients that save JSON or NumPy (exam rounds
    # 2-8, e.g. r8 ge_10_seed_log)).
    own = bool(saves) and all(record.op == "write" for record in saves)
    return (
        "the script writes its checkpoints itself, through neither DCP nor torch.save"
        if own
        else ""
    )


def only_exports(evidence: Evidence) -> str:
    """Why rules on a resume do not apply: what is written is an export.

    "" if it may be a checkpoint, or somebody says so.
    """
    train = evidence.train
    if (
        train is None
        or evidence.saving is not None
        or evidence.course.resumes
        or not evidence.sources.project
    ):
        return ""
    seen = {record.op for record in train.all(Checkpoint)}
    # What only torch.save writes and nothing resumes from is an export; weights that the run begins
    # with are loaded in a run from scratch.
    if not seen or not seen <= {"torch.save", *LOADS} - {"load"}:
        return ""
    return (
        "the script exports with torch.save, and loads"
        f" {'only what it begins with' if evidence.loading else 'nothing'}"
    )


def unseen_save(evidence: Evidence) -> str:
    """Why rules on checkpoints judge nothing: the sources can save, the train run did not."""
    train, saving = evidence.train, evidence.saving
    # A simulated run saves nothing by design; its tier says so itself.
    if train is None or train.steps() == 0 or saving is None or train.role == "simulate":
        return ""
    if any(r.op in (*SAVES, "write") for r in train.all(Checkpoint)):
        return ""
    steps = train.steps()
    place = f"{saving.file.rpartition('/')[2]}:{saving.line}"
    advice = "no option of the script was found that makes it save earlier"
    if saves_by_option(evidence.options):
        advice = (
            f"give --save-args that save after one of the steps 1 to {steps - 1} (or more --steps),"
            " and --resume-args"
        )
    return Uncovered(
        f"the sources can save ({place} `{saving.code[:60]}`), but the train run of {steps} steps"
        f" did not: {advice}",
        "checkpoint",
    )


def saves_by_option(options: Iterable[Option]) -> bool:
    """Whether an option of the script looks as if it said where or how often to save."""
    return not {"save", "folder"}.isdisjoint(by_purpose(options))


def named_paths(words: Sequence[str]) -> list[str]:
    """The paths below `{checkpoint}` that arguments name, relative to it: `step_6` of
    `--resume={checkpoint}/step_6`.
    """
    found = (word.partition(PLACE + "/")[2].strip("/") for word in words)
    return [path for path in found if path and "{" not in path]


def number_in(path: str) -> int | None:
    """The last number in a path: 6 in `step_000006/model`."""
    numbers = re.findall(r"\d+", path)
    return int(numbers[-1]) if numbers else None


def unwritten(words: Sequence[str], left: Collection[str]) -> str:
    """The numbered path below `{checkpoint}` that arguments name and no rank wrote; "" if there is
    none.

    `left`: what is there, relative to it. A path may be the beginning of a name (`ckpt` of
    `ckpt.rank0.pt`). A path without a number may be one that the run is to write.
    """
    lost = [path for path in named_paths(words) if not any(item.startswith(path) for item in left)]
    # A path without a number may be one that the resumed run itself is to write (`--out
    # {checkpoint}/again`) (test_paths_that_resume_args_name).
    return next((path for path in lost if number_in(path) is not None), "")
