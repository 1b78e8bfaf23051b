from collections.abc import Iterator

from ...analysis.presence import unfinished
from ...analysis.saves import all_saves
from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import is_const
from ...source.registry import detector
from ...source.values import Value, choices
from ...trace.events import SaveInFlight
from ..base import Rule
from ._holds import nothing_saved


class AsyncSaveProcessGroup(Rule):
    """A save in the background has a process group of its own.

    Why: `async_save` issues collectives in a thread. On the group that training uses they meet those of the main thread in an
    order that no two ranks share: a deadlock, sooner or later. On NCCL alone it is refused at once.
    Wrong:
        future = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        model(batch)  # collectives on the same group while the save is in flight
        future.result()
    Right:
        group = dist.new_group(backend="gloo")  # once, at the start
        future = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=path, process_group=group)
        model(batch)
        future.result()
    Fix: Make a gloo group once, `group = dist.new_group(backend="gloo")`, and give it to every `async_save` as `process_group`.
    Source: KempnerInstitute/KempnerForge#104; ByteDance-Seed/VeOmni PR#1176; InternLM/xtuner PR#1703.
    """

    wants = "run"

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or nothing_saved(
            evidence, lambda save: save.op == "async_save", "no asynchronous save"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        for trace in run.traces:
            for record in trace.of(SaveInFlight):
                if not record.apart:
                    where = f", line {record.at_line.line}" if record.at_line is not None else ""
                    return self.failed(
                        f"rank {trace.rank} issues collectives ({record.what}{where}) on the group "
                        "on which an asynchronous save is in flight",
                        record.saved_line,
                    )
        number = sum(save.op == "async_save" for save in all_saves(run)) // max(run.world_size, 1)
        if not number:
            return self.unknown(unfinished(run) or "no asynchronous save was seen")
        return self.passed(f"{count(number, 'asynchronous save')}, none on a group that the main thread used meanwhile")


@detector("async-save-process-group")
def async_save_group(flow: Flow) -> Iterator[Hit]:
    groups = flow.ops("dist.init_process_group")
    backends = {one.const for e in groups for one in choices(e.arg(0, "backend") or Value("unknown"))}
    if not groups or not backends <= {"gloo", "nccl"}:
        return
    for event in flow.ops("dcp.async_save"):
        given = event.kwargs.get("process_group")
        alone = given is None or is_const(given, None)
        awaited = any(e.on is event.result and e.index == event.index + 1 for e in flow.methods("result"))
        if alone and not event.open and not awaited and "async_checkpointer_type" not in event.kwargs:
            told = "the background save and the training use one process group, in no fixed order"
            yield flow.hit("async-save-process-group", told, event)
