from ...analysis.applicability import unnamed, unseen_load, went_through
from ...source.flow_queries import is_const, made_by
from ...trace.events import SetState
from ..base import Evidence, Finding, Flow, Hits, Rule, count, some
from ..policies import SkippedWith

SETTERS = ("set_model_state_dict", "set_state_dict")


class Rank0SdWithoutBroadcast(Rule):
    """A state dict that only rank 0 has is set with `broadcast_from_rank0=True`, and is whole.

    Why: `set_model_state_dict` is a collective. If rank 0 has read the file and the others hold an
    empty dict, the others raise or do nothing while rank 0 waits for them until a time-out, or
    `Connection closed by peer`. A broadcast leaves every rank with rank 0's values: of experts of
    which each rank has made, or loaded, its own, those of rank 0 remain.
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
    Source: verl-project/verl#6365; axolotl-ai-cloud/axolotl#3476; huggingface/accelerate PR#3921;
    experts: huggingface/transformers#45662.
    """

    explains = ("meta-params-not-reset", "run-completes")
    reads = frozenset({"resume", "single"})
    wants = "run"
    policies = (SkippedWith("checkpoint"),)

    def applies(self, evidence: Evidence) -> str:
        # A setter that the sources name and no run reached may run in a resume: then it is open,
        # not absent (exam round 10 kd_07_traffic_best_model twin (inconclusive)).
        may = evidence.saving is not None and not unnamed(evidence.sources, *SETTERS)
        if not went_through(evidence) or _calls(evidence) or may:
            return ""
        return f"the script calls no {' or '.join(SETTERS)}"

    def unseen(self, evidence: Evidence) -> str:
        return unseen_load(evidence, *SETTERS) if not _calls(evidence) else ""

    def judge(self, evidence: Evidence) -> Finding:
        calls = _calls(evidence)
        for records in calls:
            empty = [rank for rank, r in enumerate(records) if r.given == 0]
            # Ranks without keys are right if torch broadcasts from rank 0, or if no rank has any
            # (zoo/broadcast_from_rank0.py).
            if empty and len(empty) < len(records) and not all(r.broadcast for r in records):
                full = next(r for r in records if r.given)
                given = (
                    f"{count(full.given, 'key')} on some ranks and none on rank"
                    f" {some(map(str, empty))}"
                )
                return self.failed(
                    f"{full.op} without broadcast_from_rank0 is given {given}", full.at_line
                )
        from_one = next((r for records in calls for r in records if r.broadcast), None)
        lost = _parts_of_ranks(evidence)
        if from_one is not None and lost:
            name, here, alone = lost[0]
            what = (
                f"{name} has the shape {here} on {count(evidence.trained.world_size, 'rank')} and"
                f" {alone} in one process: each rank has made its own part"
            )
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            fix = (
                "Gather the parts of all ranks into the whole before rank 0 broadcasts it, or shard"
                " what a rank owns on a mesh of its own and leave it out of the broadcast."
            )
            return self.failed(
                f"{what}, and the broadcast gives all of them that of rank 0{more}",
                from_one.at_line,
                fix=fix,
            )
        if not calls:
            return self.unknown(f"no run called {' or '.join(SETTERS)}")
        if all(len(records) == 1 for records in calls):
            return self.unknown("with one rank, rank 0 has all keys: give --nproc 2")
        return self.passed(
            f"in {count(len(calls), 'call')} every rank had keys, or rank 0 broadcast them"
        )

    def detect(self, flow: Flow) -> Hits:
        setters = {
            "dsd.set_model_state_dict": (1, "model_state_dict"),
            "dsd.set_state_dict": (2, "model_state_dict"),
        }
        for event in flow.ops(*setters):
            state, options = event.arg(*setters[event.op]), event.kwargs.get("options")
            made = made_by(options, "dsd.StateDictOptions")
            unclear = event.open or (options is not None and (made is None or made.open))
            if state is None or unclear or event.on_some_ranks or state.kind != "either":
                continue
            broadcast = made.kwargs.get("broadcast_from_rank0") if made is not None else None
            read = [
                p
                for p in state.parts
                if p.event is not None and p.kind == "made" and p.event.on_some_ranks
            ]
            rest = [p for p in state.parts if p not in read]
            empty = all(
                (p.kind == "dict" and not p.parts) or (p.kind == "const" and p.const is None)
                for p in rest
            )
            if read and rest and empty and (broadcast is None or is_const(broadcast, False)):
                yield (
                    "only some ranks have the state dict, and broadcast_from_rank0 is not set",
                    event,
                )


def _calls(evidence: Evidence) -> list[tuple[SetState, ...]]:
    """What the ranks gave in each call of a setter, of the train run and of the resumed one."""
    runs = [run for run in (evidence.train, evidence.resume) if run is not None]
    return [
        records
        for run in runs
        for records in zip(*(t.of(SetState) for t in run.traces), strict=False)
    ]


def _parts_of_ranks(evidence: Evidence) -> list[tuple[str, list[int], list[int]]]:
    """(name, shape, shape in one process) of the parameters that all ranks shard and of which one
    process has as many times the elements as there are ranks.
    """
    train, single = evidence.trained, evidence.single
    if single is None or train.world_size == 1:
        return []
    alone = {name: entries[0] for name, entries in single.parameters.items()}
    return [
        (name, entry.shape, alone[name].shape)
        for name, (entry, *_) in train.parameters.items()
        # On a mesh of fewer ranks each group may own its part (expert parallelism).
        if entry.sharded and len(entry.ranks) == train.world_size and name in alone
        if alone[name].numel == entry.numel * train.world_size
    ]
