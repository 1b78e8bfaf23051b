import math
from typing import Any

from ...analysis.saves import saves_of
from ...source.flow_queries import SAVES, state_given
from ...tolerances import GENERATOR_BYTES
from ...trace.events import Place, Step
from ..base import Evidence, Finding, Flow, Hits, Run
from ._resumed import ResumeRule, load_line, saved_at

# Calls that return the state of a rank's own default generator (faults
# per_rank_state_deduplicated*.py).
_RANDOM = tuple(f"{module}.get_rng_state" for module in ("torch", "torch.random", "torch.cuda"))
_RANDOM += ("random.getstate", "numpy.random.get_state")


class PerRankStateDeduplicated(ResumeRule):
    """After a resume every rank has its own random state and data position, not another rank's.

    Why: DCP takes equal keys of plain tensors and objects on several ranks for replicas and stores
    one. A random state or a sampler position saved under one key comes back as one rank's on all
    ranks: same dropout masks, same samples.
    Wrong:
        # one key, another value on every rank
        state = {"model": model_state, "rng": torch.get_rng_state()}
        dcp.save(state, checkpoint_id=path)
    Right:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())  # the same list on every rank
        state = {"model": model_state, "rng": states}
        dcp.save(state, checkpoint_id=path)
    Fix: Save per-rank values as one gathered list (or under a key with the rank) and let each rank
    take its own entry.
    Source: pytorch#120356, #146566; NVIDIA/Megatron-LM PR#6858 (252 of 256 ranks wrong).
    """

    wants = "run"
    one_rank = "it has the only random state"

    def judge(self, evidence: Evidence) -> Finding:
        if (found := _one_of_several(evidence.trained)) is not None:
            key, what, line = found
            # The other ranks' values come back as those of one.
            return self.failed(
                f"`{key}` is {what} under one key: DCP stores one of them",
                line,
                explains=("optim-template-empty", "state-restored"),
            )
        return super().judge(evidence)

    def compare(self, evidence: Evidence, saved: list[Step], resumed: list[Step]) -> Finding:
        train, resume, step = evidence.trained, evidence.resume, saved[0].step
        assert resume is not None
        drawn = [_random(train, step) for step in range(1, train.steps() + 1)]
        kinds: dict[str, tuple[list[Any], list[Any]]] = {
            "random state": (_random(train, step), _random(resume, 1)),
            "samples": (train.rows(step), resume.rows(1)),
        }
        for what, (theirs, mine) in kinds.items():
            # If no step draws from the ranks' own generators, another state in them has no effect
            # (scripts with keyed noise only).
            if what == "random state" and all(state == drawn[0] for state in drawn):
                continue  # training draws nothing from the ranks' own generators
            for rank, value in enumerate(mine):
                owner = next(
                    (r for r, other in enumerate(theirs) if r != rank and other == value and other),
                    None,
                )
                # Only a rank that got exactly another rank's value was given the one that DCP kept.
                if value != theirs[rank] and owner is not None:
                    found = (
                        f"after the resume rank {rank} has the {what} of rank {owner} (step {step})"
                    )
                    return self.failed(f"{found}{saved_at(evidence)}", load_line(evidence))
        kept = [what for what, (theirs, mine) in kinds.items() if theirs == mine]
        return self.passed(
            f"after the resume no rank has another's state (restored: {', '.join(kept) or 'none'})"
        )

    def detect(self, flow: Flow) -> Hits:
        seeds = flow.ops("torch.manual_seed", "torch.cuda.manual_seed", "random.seed")
        if not any(e.args and e.args[0].rank for e in seeds):
            return
        for event in flow.ops(*SAVES):
            state = state_given(event)
            for key, item in (
                state.attrs.items() if state is not None and state.kind == "dict" else ()
            ):
                if key.startswith("[") and item.kind == "made" and item.name in _RANDOM:
                    yield (
                        f"{key[1:-1]!r} is each rank's own random state: DCP stores one of them",
                        item.event,
                    )


def _one_of_several(run: Run) -> tuple[str, str, Place | None] | None:
    """(key, what it is, line) of a save by all ranks together that holds another tensor on each of
    them under one key.
    """
    ranks = [[save for save in saves_of(trace) if save.together] for trace in run.traces]
    for saves in zip(*ranks, strict=False):
        states = [save.record.random for save in saves]
        for key, entry in saves[0].entries.items():
            mine = [
                own.sketch if (own := save.entries.get(key)) is not None else None for save in saves
            ]
            # DTensors are stored shard by shard, and equal plain tensors once are enough: only
            # plain tensors that differ lose something.
            if entry.kind != "tensor" or None in mine or all(m == mine[0] for m in mine):
                continue
            if mine == states or (
                entry.dtype == "uint8" and math.prod(entry.shape) in GENERATOR_BYTES
            ):
                return key, "each rank's own random state", saves[0].line
            # One number that differs between ranks may be a rank's time or loss for a log; more
            # than one is a statistic or state.
            if "float" in (entry.dtype or "") and math.prod(entry.shape) > 1:
                reduce = (
                    "(one for all ranks, such as a statistic, is made of what is summed over them)"
                )
                return key, f"another tensor on each rank {reduce}", saves[0].line
    return None


def _random(run: Run, step: int) -> list[str | None]:
    return [next((m.random for m in micros), None) for micros in run.micros(step)]
