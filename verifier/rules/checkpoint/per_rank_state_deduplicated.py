from collections.abc import Iterator
from typing import Any

from ...analysis.saves import saves_of
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks_checkpoint import SAVES, state_given
from ...source.registry import detector
from ...trace import Run
from ...trace.events import Place
from ..base import Rule
from ._resumed import NEEDS, first_steps, load_line, saved_at


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
    Fix: Save per-rank values as one gathered list (or under a key that holds the rank) and let each rank take its
    own entry.
    Source: pytorch#120356, #146566; NVIDIA/Megatron-LM PR#6858 (252 of 256 ranks wrong).
    """

    wants = "run"
    needs = NEEDS

    def applies(self, evidence: Evidence) -> str:
        one = evidence.trained.world_size == 1
        return super().applies(evidence) or ("one rank has one state" if one else "")

    def judge(self, evidence: Evidence) -> Finding:
        if (found := _one_random_state(evidence.trained)) is not None:
            key, line = found
            return self.failed(
                f"`{key}` is the random state of its rank on every rank; under one key only one is kept", line
            )
        pair = first_steps(evidence)
        if isinstance(pair, str):
            return self.unknown(pair)
        train, resume = evidence.trained, evidence.resume
        assert resume is not None
        step = pair[0][0].step
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


def _one_random_state(run: Run) -> tuple[str, Place | None] | None:
    """(key, line) of a save by all ranks together that holds another generator state on each of them under one key."""
    ranks = [[save for save in saves_of(trace) if save.together] for trace in run.traces]
    for saves in zip(*ranks, strict=False):
        for key, entry in saves[0].entries.items():
            mine = [own.sketch if (own := save.entries.get(key)) is not None else None for save in saves]
            states = [save.record.random for save in saves]
            if entry.dtype == "uint8" and None not in mine and mine == states and any(m != mine[0] for m in mine):
                return key, saves[0].line
    return None


def _random(run: Run, step: int) -> list[str | None]:
    return [next((m.random for m in micros), None) for micros in run.micros(step)]


_RANDOM = (
    "torch.get_rng_state",
    "torch.random.get_rng_state",
    "torch.cuda.get_rng_state",
    "random.getstate",
    "numpy.random.get_state",
)


@detector("per-rank-state-deduplicated")
def per_rank_state(flow: Flow) -> Iterator[Hit]:
    seeded = [
        e for e in flow.ops("torch.manual_seed", "torch.cuda.manual_seed", "random.seed") if e.args and e.args[0].rank
    ]
    if not seeded:
        return
    for event in flow.ops(*SAVES):
        state = state_given(event)
        if state is None or state.kind != "dict":
            continue
        for key, item in state.attrs.items():
            if key.startswith("[") and item.kind == "made" and item.name in _RANDOM:
                told = f"every rank saves its own random state under the one key {key[1:-1]!r}; the checkpoint keeps one of them"
                yield flow.hit("per-rank-state-deduplicated", told, item.event)
