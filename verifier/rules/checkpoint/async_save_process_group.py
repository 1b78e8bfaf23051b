from ...analysis.saves import Save
from ...source.flow_queries import is_const
from ...source.values import Value, choices
from ...trace.events import SaveInFlight
from ..base import Finding, Flow, Hits, Run, count
from ._saved import SaveRule


class AsyncSaveProcessGroup(SaveRule):
    """`dcp.async_save` has a process group of its own.

    Why: `async_save` issues collectives in a thread. On the group that training uses they
    interleave with those of the main thread, in a different order on every rank: sooner or later a
    deadlock. With NCCL alone, torch raises at once.
    Wrong:
        future = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        model(batch)  # collectives on the same group while the save is in flight
        future.result()
    Right:
        group = dist.new_group(backend="gloo")  # once, at the start
        state = {"model": get_model_state_dict(model)}
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
        model(batch)
        future.result()
    Fix: Create one gloo group, `dist.new_group(backend="gloo")`, and pass it to every `async_save`
    as `process_group`.
    Source: KempnerInstitute/KempnerForge#104; ByteDance-Seed/VeOmni PR#1176; InternLM/xtuner
    PR#1703.
    """

    explains = ("run-completes",)
    kind = "asynchronous save"

    def about(self, save: Save) -> bool:
        return save.op == "async_save"

    def check(self, run: Run, saves: list[Save]) -> Finding:
        for trace in run.traces:
            for record in trace.of(SaveInFlight):
                # Only collectives of the main thread on the group of the save in flight can
                # interleave with it; on another group they are right (fault
                # async_save_process_group.yaml).
                if not record.apart:
                    what = record.what + (
                        f", line {record.at_line.line}" if record.at_line is not None else ""
                    )
                    where = "on the process group of an asynchronous save in flight"
                    return self.failed(
                        f"rank {trace.rank} issues collectives ({what}) {where}", record.saved_line
                    )
        number = count(len(saves) // max(run.world_size, 1), "asynchronous save")
        return self.passed(f"{number}, none on a process group that the main thread used meanwhile")

    def detect(self, flow: Flow) -> Hits:
        groups = flow.ops("dist.init_process_group")
        backends = {
            one.const for e in groups for one in choices(e.arg(0, "backend") or Value("unknown"))
        }
        # With a backend string for both devices (`cpu:gloo,cuda:nccl`) DCP runs its collectives on
        # gloo, apart from the training's NCCL: nothing meets (zoo/async_checkpoint.py).
        if not groups or not backends <= {"gloo", "nccl"}:
            return
        for event in flow.ops("dcp.async_save"):
            given = event.kwargs.get("process_group")
            alone = given is None or is_const(given, None)
            awaited = any(
                e.on is event.result and e.index == event.index + 1 for e in flow.methods("result")
            )
            if (
                alone
                and not event.open
                # If the very next call waits for the future, the training issues no collective
                # meanwhile.
                and not awaited
                # A checkpointer in a process has a process group of its own.
                and "async_checkpointer_type" not in event.kwargs
            ):
                yield (
                    (
                        "async_save without process_group runs its collectives on the group of the"
                        " training"
                    ),
                    event,
                )
