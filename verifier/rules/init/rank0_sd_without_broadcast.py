from collections.abc import Iterator

from ...analysis.presence import unnamed, unseen_load, went_through
from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import is_const, made_by
from ...source.registry import detector
from ...trace.events import SetState
from ..base import Rule


class Rank0SdWithoutBroadcast(Rule):
    """A state dict that only rank 0 holds is set with `broadcast_from_rank0=True`.

    Why: `set_model_state_dict` is a collective. If rank 0 has read the file and the others hold an empty dict, the
    others raise or do nothing while rank 0 waits for them: a time-out, or `Connection closed by peer`.
    Wrong:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        state = state if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    Right:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        state = state if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    Fix: Pass `StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)`.
    Source: verl-project/verl#6365; axolotl-ai-cloud/axolotl#3476; huggingface/accelerate PR#3921.
    """

    explains = ("meta-params-not-reset",)

    reads = frozenset({"resume"})
    wants = "run"
    skipped_with = ("checkpoint",)

    def applies(self, evidence: Evidence) -> str:
        if (
            not went_through(evidence)
            or _calls(evidence)
            or (evidence.saving is not None and not unnamed(evidence.sources, *SETTERS))
        ):
            return ""
        return "the script sets no state dict with torch's setters"

    def unseen(self, evidence: Evidence) -> str:
        return unseen_load(evidence, *SETTERS) if not _calls(evidence) else ""

    def judge(self, evidence: Evidence) -> Finding:
        calls = _calls(evidence)
        for records in calls:
            empty = [rank for rank, r in enumerate(records) if r.given == 0]
            if empty and len(empty) < len(records) and not all(r.broadcast for r in records):
                full = next(r for r in records if r.given)
                return self.failed(
                    f"{full.op} is given {count(full.given, 'key')} on some ranks and none on "
                    f"{count(len(empty), 'rank')} (first: rank {empty[0]}), without broadcast_from_rank0",
                    full.at_line,
                )
        if not calls:
            return self.unknown("no run came to a call of torch's setters")
        if all(len(records) == 1 for records in calls):
            return self.unknown("one rank holds all: give --nproc 2")
        return self.passed(f"every rank gave keys, or rank 0 broadcast them, in {count(len(calls), 'call')}")


SETTERS = ("set_model_state_dict", "set_state_dict")


def _calls(evidence: Evidence) -> list[tuple[SetState, ...]]:
    """What the ranks gave in each call of a setter, of the train run and of the resumed one."""
    runs = [run for run in (evidence.train, evidence.resume) if run is not None]
    return [records for run in runs for records in zip(*(t.of(SetState) for t in run.traces), strict=False)]


@detector("rank0-sd-without-broadcast")
def rank0_without_broadcast(flow: Flow) -> Iterator[Hit]:
    setters = {"dsd.set_model_state_dict": (1, "model_state_dict"), "dsd.set_state_dict": (2, "model_state_dict")}
    for event in flow.ops(*setters):
        state = event.arg(*setters[event.op])
        options = event.kwargs.get("options")
        made = made_by(options, "dsd.StateDictOptions") if options is not None else None
        unclear = event.open or (options is not None and (made is None or made.open))
        if state is None or unclear or event.on_some_ranks or state.kind != "either":
            continue
        if (
            made is not None
            and "broadcast_from_rank0" in made.kwargs
            and not is_const(made.kwargs["broadcast_from_rank0"], False)
        ):
            continue
        read = [p for p in state.parts if p.event is not None and p.kind == "made" and p.event.on_some_ranks]
        rest = [p for p in state.parts if p not in read]
        if (
            read
            and rest
            and all((p.kind == "dict" and not p.parts) or (p.kind == "const" and p.const is None) for p in rest)
        ):
            told = "only some ranks hold the state dict, and broadcast_from_rank0 is not set"
            yield flow.hit("rank0-sd-without-broadcast", told, event)
