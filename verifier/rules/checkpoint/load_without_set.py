from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow
from ...source.looks import made_by, text
from ...source.looks_checkpoint import has_option, options_of, state_given
from ...source.registry import detector
from ...source.values import Value, reach
from ...trace.events import Saving, Step
from ..base import Rule
from ._resumed import NEEDS, first_steps, load_line, saved_at


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
    Fix: After `dcp.load`, call `set_model_state_dict` / `set_state_dict` with the loaded dict.
    Source: the DCP tutorial's pattern; pytorch#114299; RLinf PR#283.
    """

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
                for n in s.weights
                if n in r.weights and s.weights[n] != r.weights[n]
            }
        )
        if not wrong:
            return self.passed(f"{count(len(saved[0].weights), 'parameter')} bitwise as saved")
        fresh = {n: e[0].sketch for n, e in evidence.trained.parameters.items()}
        initial = [n for n in wrong if resumed[0].weights.get(n) == fresh.get(n)]
        what = f"; {len(initial)} of them still have their initial values" if initial else ""
        told = f"{len(wrong)} of {len(saved[0].weights)} parameters ({some(wrong)})"
        if _not_in_the_save(evidence, saved[0], wrong):
            return self.failed(
                f"{told} are not what they were at the save, and are in no save: a model that is not in the checkpoint{what}"
                f"{saved_at(evidence)}",
                load_line(evidence),
                fix="Save and restore this model too, or build it so that it comes out the same in a resumed run.",
            )
        return self.failed(f"{told} are not what was saved{what}", load_line(evidence))


def _not_in_the_save(evidence: Evidence, before: Step, wrong: list[str]) -> bool:
    """Whether other weights of rank 0 are found among what it gave to the saves, and none of these."""
    given = {
        tuple(entry.sketch)
        for record in evidence.trained.traces[0].of(Saving)
        for entry in record.entries.values()
        if entry.sketch
    }
    found = {name for name, value in before.weights.items() if tuple(value) in given}
    return bool(found) and not found & set(wrong)


@detector("load-without-set")
def load_without_set(flow: Flow) -> Iterator[Hit]:
    for event in flow.ops("dcp.load"):
        state = state_given(event)
        if state is None or state.kind != "dict":
            continue
        for part in reach(state):
            got = made_by(part, "dsd.get_model_state_dict")
            options = options_of(got) if got is not None else None
            copied = has_option(options, "full_state_dict") or has_option(options, "cpu_offload")
            if got is None or not copied or not flow.certain:
                continue
            later = flow.events[event.index + 1 :]
            if any(_sets_model(e, state) for e in later) or flow.escapes(state, event.index):
                continue
            told = f"dcp.load fills the copy that {text(got.node)} made, and nothing sets it into the model afterwards"
            yield flow.hit("load-without-set", told, event)
            break


def _sets_model(event: Event, state: Value) -> bool:
    sets = event.op in ("dsd.set_model_state_dict", "dsd.set_state_dict") or event.method in (
        "load_state_dict",
        "copy_",
    )
    if event.method == "load_state_dict" and event.on is not None and event.on.name.startswith("torch.optim"):
        return False
    return sets
