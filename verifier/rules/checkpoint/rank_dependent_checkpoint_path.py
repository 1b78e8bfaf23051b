from pathlib import Path

from ...analysis.applicability import unfinished
from ...analysis.reopened_checkpoints import opened
from ...analysis.saves import Save, all_saves, saves_of
from ...source.flow_queries import SAVES, made_by, shared
from ...source.values import GLOBAL, reach
from ..base import Evidence, Finding, Flow, Hits, count, some
from ._saved import KindRule

_TIMES = ("time.time", "time.time_ns", "datetime.datetime.now")
# Calls that give another value in each process: clocks, random ids, temporary folders, process ids
# (fault rank_dependent_checkpoint_path.yaml (time.time_ns in the path)).
_VARIES = (*_TIMES, "uuid.uuid1", "uuid.uuid4", "tempfile.mkdtemp", "os.getpid")


class RankDependentCheckpointPath(KindRule):
    """All ranks pass the same path to a save, and every file that its metadata names exists.

    Why: a path that contains the rank, a time or a random name differs between ranks: each writes
    its shards into a folder of its own, one of them gets the metadata, and the missing shards show
    only at the resume.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{path}/{time.time_ns()}")
    Right:
        names = [f"{path}/{time.time_ns()}"]
        dist.broadcast_object_list(names, src=0)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=names[0])
    Fix: Make the path on rank 0 and broadcast it; write to storage that all ranks share.
    Source: TensorAuto/OpenTau PR#396 (a time stamp of each rank's own);
    NVIDIA-BioNeMo/bionemo-recipes PR#786 (a rank's own loss in the path); measured:
    FileNotFoundError on `__1_0.distcp` at the resume; the save itself raises nothing.
    """

    needs = frozenset({"train", "inspect"})
    kind = "save by all ranks together"

    def about(self, save: Save) -> bool:
        return save.together

    def applies(self, evidence: Evidence) -> str:
        return (
            ""
            if any(record.missing_files for record in opened(evidence))
            else super().applies(evidence)
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        ranks = [[s for s in saves_of(trace) if self.about(s)] for trace in run.traces]
        for saves in zip(*ranks, strict=False):
            if len({save.to for save in saves}) > 1:
                shown = [(save.rank, Path(save.to)) for save in saves]
                one_folder = len({path.parent for _, path in shown}) == 1
                paths = "; ".join(
                    f"rank {rank} to {path.name if one_folder else path}"
                    for rank, path in shown[:3]
                )
                return self.failed(
                    f"the ranks write one save to different paths: {paths}", saves[0].line
                )
        for record in opened(evidence):
            if record.missing_files:
                line = next((s.line for s in all_saves(run)), None)
                return self.failed(
                    f"{record.path}: {record.error} ({some(record.missing_files)})", line
                )
        if not any(ranks):
            return self.unknown(unfinished(run) or f"no {self.kind} was recorded")
        return self.passed(f"{count(len(ranks[0]), 'save')}, each to one path on all ranks")

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops(*SAVES):
            # A save by one rank, or without the others (no_dist), needs no common path
            # (zoo/checkpoint_per_rank_files.py).
            if event.on_some_ranks or "no_dist" in event.kwargs:
                continue
            made = made_by(event.kwargs.get("storage_writer"), "dcp.FileSystemWriter")
            path = made.arg(0, "path") if made is not None else event.kwargs.get("checkpoint_id")
            # A save of a smaller group may have one path for each group (a replica), as long as it
            # is not of the global rank (zoo/checkpoint_hsdp.py).
            if path is None or ("process_group" in event.kwargs and path.rank != GLOBAL):
                continue
            varies = next((p for p in reach(path) if p.kind == "made" and p.name in _VARIES), None)
            if (path.rank == GLOBAL or varies is not None) and not shared(path):
                what = "the rank" if path.rank == GLOBAL or varies is None else f"{varies.name}()"
                yield (
                    (
                        f"the checkpoint path contains {what}: every rank writes into a folder of"
                        " its own"
                    ),
                    event,
                )
