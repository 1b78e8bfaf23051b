from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow
from ...source.looks import steps_of, text
from ...source.looks_checkpoint import GETTERS, SETTERS, state_given
from ...source.registry import detector
from ...source.values import choices, reach
from ..base import Rule
from ._resumed import NEEDS, first_steps, keeps_no_state, load_line


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
    Fix: Build the template with `get_state_dict(model, optimizer)` and give the loaded dict to `set_state_dict`.
    Source: meta-pytorch/torchtune#2553; pytorch#114299; measured: 16 entries saved, 0 restored, no error.
    """

    needs = NEEDS

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or keeps_no_state(evidence.trained)

    def judge(self, evidence: Evidence) -> Finding:
        pair = first_steps(evidence)
        if isinstance(pair, str):
            return self.unknown(pair)
        saved, resumed = pair
        had = {n for record in saved for n, state in record.state.items() if state}
        if not had:
            return self.unknown("the optimizer had no state yet when the checkpoint was saved")
        empty = sorted(n for n in had if all(not r.state.get(n) for r in resumed))
        wrong = sorted(n for s, r in zip(saved, resumed, strict=True) for n in s.state if s.state[n] != r.state.get(n))
        if not wrong:
            return self.passed(f"state of {count(len(had), 'parameter')} bitwise as saved")
        if empty:
            told = f"{len(empty)} of {len(had)} parameters ({some(empty)}) come back without any optimizer state"
        else:
            name = wrong[0]
            keys = [k for k, v in saved[0].state.get(name, {}).items() if resumed[0].state.get(name, {}).get(k) != v]
            told = f"the optimizer state of {len(set(wrong))} of {len(had)} parameters is not what was saved ({name}: {some(keys)})"
        return self.failed(told, load_line(evidence))


@detector("optim-template-empty")
def optim_template_empty(flow: Flow) -> Iterator[Hit]:
    steps = steps_of(flow)
    for event in flow.ops("dcp.load"):
        state = state_given(event)
        for part in reach(state) if state is not None else ():
            if part.kind != "made" or part.name != "state_dict" or part.event is None or part.event.on is None:
                continue
            made = [o for o, _ in flow.optimizers if o.result in choices(part.event.on)]
            plain = [o for o in made if o.op.startswith("torch.optim.") and not _stateless(o)]
            filled = any(e.index < event.index for e in steps) or any(
                e.index < event.index for e in flow.ops(*GETTERS[1:], *SETTERS[1:])
            )
            if plain and not filled:
                told = f"{text(part.event.node)} of an optimizer that has made no step is empty: dcp.load restores nothing of it"
                yield flow.hit("optim-template-empty", told, part.event)
                break


def _stateless(event: Event) -> bool:
    return event.op == "torch.optim.SGD" and "momentum" not in event.kwargs and not event.open
