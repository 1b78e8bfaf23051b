import math

from ...source.flow_queries import SETTERS, has_option, made_by, options_of, state_given, text
from ...source.values import reach
from ...tolerances import BFLOAT16
from ...trace import difference
from ...trace.events import Saving, Step
from ...trace.sketches import Sketch
from ..base import Event, Evidence, Finding, Flow, Hits, count, some
from ..policies import ShownBy
from ._resumed import ResumeRule, load_line, saved_at
from .saved_while_replaced import replaced


class LoadWithoutSet(ResumeRule):
    """After a resume the model has the saved weights.

    Why: `dcp.load` fills the dict that it is given. A full or copied state dict
    (`full_state_dict=True`, a clone, a CPU copy) is not the model's own memory: unless it is set
    back, the model goes on training from fresh weights.
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

    policies = (ShownBy("resume-is-exact"),)

    def compare(self, evidence: Evidence, saved: list[Step], resumed: list[Step]) -> Finding:
        pairs = [(s.weights, r.weights) for s, r in zip(saved, resumed, strict=True)]
        wrong = sorted({n for s, r in pairs for n in s if n in r and s[n] != r[n]})
        # What came back as it was saved, but other weights were in the model during the save, is
        # the fault of saved-while-replaced (fault saved_while_replaced.yaml).
        if set(wrong) <= set(replaced(evidence, saved, resumed)[0]):  # loaded as it was saved
            return self.passed(f"{count(len(saved[0].weights), 'parameter')} bitwise as saved")
        fresh = {n: e[0].sketch for n, e in evidence.trained.parameters.items()}
        initial = sum(resumed[0].weights.get(n) == fresh.get(n) for n in wrong)
        still = f"; {initial} of them still have their initial values" if initial else ""
        which = f"{len(wrong)} of {len(saved[0].weights)} parameters ({some(wrong)})"
        if _rounded(pairs, wrong) and all(set(wrong) <= set(r.halved) for r in resumed):
            fix = (
                "Save the weights in the type in which they are held: something between them and"
                " the file casts them."
            )
            what = f"{which} are what was saved, rounded to a 16-bit type{saved_at(evidence)}"
            return self.failed(what, load_line(evidence), fix=fix)
        # Other weights are found among what was saved and these never: the save lacks this model,
        # so the load is not the cause.
        if not _not_in_the_save(evidence, saved[0], wrong):
            return self.failed(f"{which} are not what was saved{still}", load_line(evidence))
        fix = (
            "Save and restore this model too, or build it so that a resumed run initialises it to"
            " the same values."
        )
        what = f"{which} differ from their values at the save, and no save contains this model"
        return self.failed(f"{what}{still}{saved_at(evidence)}", load_line(evidence), fix=fix)

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops("dcp.load") if flow.certain else ():
            state = state_given(event)
            if (
                state is None
                or state.kind != "dict"
                or any(map(_sets_model, flow.events[event.index + 1 :]))
            ):
                continue
            made = [made_by(part, "dsd.get_model_state_dict") for part in reach(state)]
            options = ("full_state_dict", "cpu_offload")
            copies = [
                got
                for got in made
                if got and any(has_option(options_of(got), name) for name in options)
            ]
            if copies and not flow.escapes(state, event.index):
                yield (
                    (
                        f"dcp.load fills the copy of {text(copies[0].node)}, which is never set"
                        " into the model"
                    ),
                    event,
                )


def _sets_model(event: Event) -> bool:
    if (
        event.method == "load_state_dict"
        and event.on is not None
        # `load_state_dict` of an optimizer sets no weights.
        and event.on.name.startswith("torch.optim")
    ):
        return False
    return event.op in SETTERS[:2] or event.method in ("load_state_dict", "copy_")


def _rounded(pairs: list[tuple[dict[str, Sketch], dict[str, Sketch]]], names: list[str]) -> bool:
    """Whether tensors are no further apart than rounding to bfloat16 may leave them."""
    shards = [(s[n], r[n]) for s, r in pairs for n in names if n in s and n in r]
    return all(difference(a, b) <= 2 * BFLOAT16 * math.sqrt(a[0]) for a, b in shards)


def _not_in_the_save(evidence: Evidence, before: Step, wrong: list[str]) -> bool:
    """Whether other weights of rank 0 are found among what it gave to the saves, and none of
    these.
    """
    saves = evidence.trained.traces[0].of(Saving)
    given = {
        tuple(entry.sketch) for save in saves for entry in save.entries.values() if entry.sketch
    }
    found = {name for name, value in before.weights.items() if tuple(value) in given}
    return bool(found) and not found & set(wrong)
