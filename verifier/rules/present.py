"""What a script has and what its runs have come to, for `applies()` and `unseen()` of rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..evidence import LOADS, Evidence
from ..trace import Run
from ..trace.events import Checkpoint, SetState, Shard

UNSHARDED = "no call of fully_shard was seen"


def named(evidence: Evidence, *words: str) -> bool:
    """Whether the project's sources hold one of these words; True if there are no sources to look at."""
    texts = [evidence.sources.texts.get(file, "") for file in evidence.sources.project]
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)")
    return not texts or any(pattern.search(text) for text in texts)


def trainings(evidence: Evidence) -> Iterator[Run]:
    """The runs of the script as it is that may stop with an error of torch: train, resume, reshard."""
    yield from (run for run in (evidence.train, evidence.resume, *evidence.reshards) if run is not None)


def went_through(evidence: Evidence) -> bool:
    """Whether the train run made steps and none of these runs was stopped: what it has not come to, the script has not."""
    train = evidence.train
    return train is not None and train.steps() > 0 and all(run.completed for run in trainings(evidence))


def unsharded(evidence: Evidence) -> str:
    """UNSHARDED if the train run went through without a call of fully_shard, else ""."""
    if not went_through(evidence):
        return ""
    return "" if any(trace.first(Shard) for trace in evidence.trained.traces) else UNSHARDED


def unseen_load(evidence: Evidence, *setters: str) -> str:
    """Why a rule on how state is loaded is open: the sources can resume and name a setter, and no run loaded anything."""
    if evidence.saving is None or not went_through(evidence) or not named(evidence, *setters):
        return ""
    for run in trainings(evidence):
        for trace in run.traces:
            if trace.first(SetState) is not None or any(r.op in LOADS for r in trace.of(Checkpoint)):
                return ""
    return f"the sources can load state ({', '.join(setters)}), and no run did: give --save-args and --resume-args"
