from collections.abc import Iterator

from ...analysis.inspected import opened
from ...analysis.presence import unfinished
from ...analysis.saves import all_saves, saves_of
from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import made_by, shared, text
from ...source.looks_checkpoint import SAVES
from ...source.registry import detector
from ...source.values import GLOBAL, reach
from ..base import Rule
from ._holds import nothing_saved


class RankDependentCheckpointPath(Rule):
    """All ranks give one save the same path, and every file that its metadata names is there.

    Why: a path with the rank, a time or a random name in it is another one on every rank: each writes its shards into a
    folder of its own, the metadata lies in one of them, and the loss of the others shows at the resume.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{path}/{time.time_ns()}")
    Right:
        names = [f"{path}/{time.time_ns()}"]
        dist.broadcast_object_list(names, src=0)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=names[0])
    Fix: Make the path on rank 0 and broadcast it; write to storage that all ranks share.
    Source: measured: FileNotFoundError on `__1_0.distcp` at the resume; the save itself does not complain.
    """

    wants = "run"
    needs = frozenset({"train", "inspect"})

    def applies(self, evidence: Evidence) -> str:
        lost = any(record.missing_files for record in opened(evidence))
        return super().applies(evidence) or nothing_saved(
            evidence, lambda save: save.together or lost, "no save is made by all ranks together"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        ranks = [[s for s in saves_of(trace) if s.together] for trace in run.traces]
        for saves in zip(*ranks, strict=False):
            if len({save.to for save in saves}) > 1:
                told = "; ".join(f"rank {save.rank} to {save.to}" for save in saves[:3])
                return self.failed(f"one save goes to different places: {told}", saves[0].line)
        for record in opened(evidence):
            if record.missing_files:
                lost = record.missing_files
                line = next((s.line for s in all_saves(run)), None)
                return self.failed(f"{record.path}: {record.error} ({some(lost)})", line)
        if not any(ranks):
            return self.unknown(unfinished(run) or "no save by all ranks was seen")
        return self.passed(f"{count(len(ranks[0]), 'save')}, each to one place from every rank")


_VARIES = (
    "time.time",
    "time.time_ns",
    "uuid.uuid4",
    "uuid.uuid1",
    "datetime.datetime.now",
    "tempfile.mkdtemp",
    "os.getpid",
)


@detector("rank-dependent-checkpoint-path")
def rank_dependent_path(flow: Flow) -> Iterator[Hit]:
    for event in flow.ops(*SAVES):
        if event.on_some_ranks or "no_dist" in event.kwargs:
            continue
        writer = event.kwargs.get("storage_writer")
        made = made_by(writer, "dcp.FileSystemWriter") if writer is not None else None
        path = made.arg(0, "path") if made is not None else event.kwargs.get("checkpoint_id")
        if path is None or ("process_group" in event.kwargs and path.rank != GLOBAL):
            continue
        varies = next((p for p in reach(path) if p.kind == "made" and p.name in _VARIES), None)
        if (path.rank == GLOBAL or varies is not None) and not shared(path):
            what = (
                "holds the rank"
                if path.rank == GLOBAL
                else f"holds {text(varies.node)}"
                if varies and varies.node
                else "varies"
            )
            told = f"the path of the checkpoint {what}: every rank writes into a folder of its own"
            yield flow.hit("rank-dependent-checkpoint-path", told, event)
