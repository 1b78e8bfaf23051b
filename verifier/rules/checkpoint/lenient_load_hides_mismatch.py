from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import is_const, made_by, names_in, text
from ...source.looks_checkpoint import SETTERS, options_of
from ...source.registry import detector
from ...trace import Run
from ...trace.events import Lenient
from ..base import Rule
from ._resumed import first_steps, not_resumed, open_resume


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
    Fix: Load strictly and name the parts alike at save and load; where keys may be missing, list them and check that list.
    Source: measured on `DefaultLoadPlanner` and `StateDictOptions(strict=False)`; pytorch#192224, #192202.
    """

    wants = "run"
    needs = frozenset({"train", "resume"})

    def applies(self, evidence: Evidence) -> str:
        seen = any(_lenient(run) for run in (evidence.train, evidence.resume))
        return super().applies(evidence) or not_resumed(evidence, seen, "no load accepts missing keys")

    def judge(self, evidence: Evidence) -> Finding:
        loads = 0
        for run in (evidence.trained, evidence.resume):
            for record in _lenient(run):
                loads += 1
                pairs = _same_but_for_a_wrapper(record.names, record.unused)
                nothing = 0 < record.wanted == record.missing_count and record.unused_count > 0
                lost = _not_back(evidence, [*record.missing, *(a for a, _ in pairs)]) if run is evidence.resume else []
                if not lost and (run is evidence.resume or not (pairs or nothing)):
                    continue
                number = len(pairs) or record.missing_count
                told = f"{number} of {record.wanted} keys were not found and {record.how} hides it"
                if pairs:
                    told += f": `{pairs[0][0]}` is asked for, `{pairs[0][1]}` is there"
                elif nothing:
                    told += f": `{record.missing[0]}` is asked for, there is `{record.unused[0]}` and the like"
                else:
                    told += f": {some(lost)} came back with other values than were saved"
                return self.failed(told, record.at_line)
        if not loads:
            return self.unknown(open_resume(evidence))
        return self.passed(f"{count(loads, 'lenient load')}, of which none lost what the checkpoint has")


def _lenient(run: Run | None) -> list[Lenient]:
    return run.traces[0].of(Lenient) if run is not None and run.traces else []


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
    names = {n for s, r in zip(*pair, strict=True) for n in s.weights if s.weights[n] != r.weights.get(n)}
    return sorted(n for n in names if any(key == n or key.endswith("." + n) for key in missing))


_WRAPPERS = ("module", "_orig_mod", "model", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "state_dict", "net")


@detector("lenient-load-hides-mismatch")
def lenient_load(flow: Flow) -> Iterator[Hit]:
    if flow.methods("requires_grad_") or names_in(flow, "peft", "lora", "LoRA", "adapter", ".requires_grad ="):
        return
    for event in flow.ops("dcp.load"):
        planner = made_by(event.kwargs.get("planner"), "dcp.DefaultLoadPlanner")
        if planner is not None and is_const(planner.kwargs.get("allow_partial_load"), True):
            told = "allow_partial_load: what the checkpoint does not hold keeps its random values, without a word"
            yield flow.hit("lenient-load-hides-mismatch", told, planner)
    for event in flow.ops(*SETTERS[:2]):
        options = options_of(event)
        given = options.kwargs.get("strict") if options is not None else None
        if given is not None and is_const(given, False) and event.discarded:
            told = f"{text(event.node)} is not strict, and nobody looks at the keys that it returns"
            yield flow.hit("lenient-load-hides-mismatch", told, event)
