from ...source.flow_queries import GETTERS, SETTERS, names_in, state_given, steps_of, text
from ...source.values import choices, reach
from ...trace.events import Step
from ..base import Event, Evidence, Finding, Flow, Hits, count, some
from ..policies import ShownBy
from ._resumed import ResumeRule, keeps_no_state, load_line


class OptimTemplateEmpty(ResumeRule):
    """After a resume the optimizer has the saved state.

    Why: `dcp.load` reads only the keys of the dict that it is given, and the raw `state_dict()` of
    a new optimizer has no state keys. The moments silently start from zero, and the first loss
    after the resume is still exact.
    Wrong:
        # a new optimizer: no state to fill
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=path)
        optimizer.load_state_dict(state["optimizer"])
    Right:
        # creates the state that load fills
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    Fix: Build the template with `get_state_dict(model, optimizer)` and give the loaded dict to
    `set_state_dict`.
    Source: meta-pytorch/torchtune#2553; pytorch#114299; measured: 16 entries saved, 0 restored, no
    error.
    """

    policies = (ShownBy("resume-is-exact"),)

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or keeps_no_state(evidence.trained)

    def compare(self, evidence: Evidence, saved: list[Step], resumed: list[Step]) -> Finding:
        had = {n for record in saved for n, state in record.state.items() if state}
        if not had:
            return self.not_applicable(
                # A save at the end of a phase comes before the next optimizer has state: nothing
                # could be lost.
                "each save that can be resumed from falls where a new optimizer begins"
            )
        empty = sorted(n for n in had if all(not r.state.get(n) for r in resumed))
        wrong = sorted(
            n
            for s, r in zip(saved, resumed, strict=True)
            for n in s.state
            if s.state[n] != r.state.get(n)
        )
        if not wrong:
            return self.passed(f"state of {count(len(had), 'parameter')} bitwise as saved")
        if not empty:
            return self._other(evidence, saved, resumed, wrong, len(had))
        which = f"{len(empty)} of {len(had)} parameters ({some(empty)})"
        return self.failed(
            f"the optimizer state of {which} is missing after the resume", load_line(evidence)
        )

    def _other(
        self,
        evidence: Evidence,
        saved: list[Step],
        resumed: list[Step],
        wrong: list[str],
        had: int,
    ) -> Finding:
        """No parameter lacks its state, but that of some is not what was saved."""
        pairs = [
            (rank, s.state.get(wrong[0], {}), resumed[rank].state.get(wrong[0], {}))
            for rank, s in enumerate(saved)
        ]
        rank, before, after = next(pair for pair in pairs if pair[1] != pair[2])
        keys = some(k for k, value in before.items() if after.get(k) != value)
        which = f"{len(set(wrong))} of {had} parameters ({wrong[0]}: {keys})"
        line = load_line(evidence)
        # Wording: all ranks got rank 0's shard (state that rank 0 alone saved; exam round 1
        # c_03_lion_state_one_rank).
        if rank == 0 or any(record.state != saved[0].state for record in resumed):
            return self.failed(f"the optimizer state of {which} is not what was saved", line)
        fix = (
            "Let each rank save and load its own part, or gather the whole state before rank 0"
            " saves it."
        )
        others = (
            f"all ranks hold what rank 0 has saved, and rank {rank} had other values in its shard"
        )
        return self.failed(f"the optimizer state of {which}: {others}", line, fix=fix)

    def detect(self, flow: Flow) -> Hits:
        # A script that fills `optimizer.state[p]` with zeros before the load makes the template
        # itself (exam round 5 r_19_alternating_towers).
        if names_in(flow, ".state["):  # a script may make the state itself
            return
        fills = [*steps_of(flow), *flow.ops(*GETTERS[1:], *SETTERS[1:])]
        for event in flow.ops("dcp.load"):
            state = state_given(event)
            if state is None or any(e.index < event.index for e in fills):
                continue
            for part in reach(state):
                if (
                    part.kind != "made"
                    or part.name != "state_dict"
                    or part.event is None
                    or part.event.on is None
                ):
                    continue
                made = [o for o, _ in flow.optimizers if o.result in choices(part.event.on)]
                if any(o.op.startswith("torch.optim.") and not _stateless(o) for o in made):
                    yield (
                        (
                            f"{text(part.event.node)} before the first step is empty: dcp.load"
                            " fills nothing"
                        ),
                        part.event,
                    )
                    break


def _stateless(event: Event) -> bool:
    # SGD without momentum keeps no state: its empty state dict is right (exam round 5
    # q_04_multitask_weights (SGD without momentum for the critic)).
    return event.op == "torch.optim.SGD" and "momentum" not in event.kwargs and not event.open
