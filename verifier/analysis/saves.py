"""What the ranks of a run passed to their saves, read from the traces."""

from dataclasses import dataclass

from ..trace import Run, Sketch, Trace
from ..trace.events import Place, SavedEntry, Saving


@dataclass(frozen=True)
class Save:
    """One call of `dcp.save`, `dcp.async_save` or `torch.save` on one rank; `to` is absolute, ""
    for no file.
    """

    rank: int
    op: str
    call: int
    after: int  # optimizer steps made before it
    to: str
    main: bool  # called in the main thread
    alone: bool  # without the other ranks (no_dist, or a group that leaves some out)
    entries: dict[str, SavedEntry]
    record: Saving

    @property
    def line(self) -> Place | None:
        """The user's line."""
        return self.record.at_line

    @property
    def together(self) -> bool:
        """Whether all ranks make this save together."""
        # With no_dist or a smaller group DCP saves for one rank: the others are not part of it.
        return self.op != "torch.save" and not self.alone


def saves_of(trace: Trace) -> list[Save]:
    """The saves of one rank, in order."""
    return [
        Save(trace.rank, r.op, r.call, r.after_step, r.to, r.main, r.alone, r.entries, r)
        for r in trace.of(Saving)
    ]


def all_saves(run: Run | None) -> list[Save]:
    """The saves of all ranks, rank by rank."""
    return [save for trace in run.traces for save in saves_of(trace)] if run is not None else []


def events(run: Run) -> list[int]:
    """The steps after which something was saved, in order."""
    return sorted({save.after for save in all_saves(run)})


def final_path(run: Run, save: Save) -> str:
    """The path of what was saved at the end of the run, after the renames of all ranks."""
    return run.path_at_end(save.to, save.record.at)


def kept(run: Run) -> dict[str, list[Save]]:
    """{path: the saves of all ranks that wrote what it holds at the end of the run}."""
    last: dict[str, list[Save]] = {}
    for save in sorted((s for s in all_saves(run) if s.to), key=lambda s: s.after):
        path = final_path(run, save)
        last[path] = [*(s for s in last.get(path, []) if s.after == save.after), save]
    return last


def given(saves: list[Save]) -> dict[str, list[Sketch]]:
    """{key: its possible values in the file}: the sum over shards, or one for each rank that passed
    the whole tensor.
    """
    found: dict[str, list[Sketch]] = {}
    parts: dict[str, dict[tuple[int, ...], Sketch]] = {}
    for save in saves:
        for key, entry in save.entries.items():
            if entry.kind == "dtensor" and entry.sketch is not None and entry.copy == 0:
                parts.setdefault(key, {})[tuple(entry.offset)] = entry.sketch
            elif (
                entry.kind == "tensor"
                and entry.sketch is not None
                and entry.sketch not in found.get(key, [])
            ):
                found.setdefault(key, []).append(entry.sketch)
    for key, shards in parts.items():
        # The shards of one key add up to its whole sketch; each offset counts once, whichever
        # replica passed it.
        found[key] = [[sum(column) for column in zip(*shards.values(), strict=True)]]
    return found
