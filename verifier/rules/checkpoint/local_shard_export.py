import math
from collections.abc import Iterator

from ...analysis.presence import unfinished
from ...analysis.saves import Save, all_saves
from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow
from ...source.looks import shared, text
from ...source.registry import detector
from ...source.values import Value, reach
from ...trace import Run
from ...trace.events import SavedEntry
from ..base import Rule
from ._holds import nothing_saved
from ._names import parameter_of


class LocalShardExport(Rule):
    """What is saved under a parameter's name is the whole parameter, or all of its shards.

    Why: `torch.save` of a DTensor or of `to_local()` writes one rank's part. From rank 0 alone, or from all ranks into
    one file, the rest of the model is nowhere; the file has the right keys, and shows it only when it is loaded.
    Wrong:
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
    Right:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(state, path)
    Fix: Make a full state dict on all ranks and write it on rank 0, or save through DCP; a file of shards needs one for each rank.
    Source: axolotl#1947; huggingface/accelerate#3487; RLinf PR#1569; verl PR#7612; Megatron-LM PR#4888.
    """

    wants = "run"

    def applies(self, evidence: Evidence) -> str:
        if reason := super().applies(evidence) or nothing_saved(
            evidence, lambda save: bool(save.to), "no file is saved"
        ):
            return reason
        return "one rank holds whole tensors" if evidence.trained.world_size == 1 else ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        saves = [save for save in all_saves(run) if save.to]
        if not saves:
            return self.unknown(unfinished(run) or "no save was seen")
        for after in sorted({save.after for save in saves}):
            stored = _stored_shards(run, [save for save in saves if save.after == after])
            lost = {name: part for name, part in stored.items() if part[0] < part[1]}
            if lost:
                name, (held, whole, save) = next(iter(lost.items()))
                how = "one rank" if len({s.rank for s in saves if s.to == save.to}) == 1 else "several ranks, one file"
                return self.failed(
                    f"{count(len(lost), 'tensor')} of the save after step {after} ({some(lost)}) "
                    f"{'is a shard' if len(lost) == 1 else 'are shards'}: {held} of the {whole} elements of {name} were written ({how})",
                    save.line,
                )
        return self.passed(f"{count(len(saves), 'call')} of a save function: whole tensors, or all shards of them")


def _stored_shards(run: Run, saves: list[Save]) -> dict[str, tuple[int, int, Save]]:
    """{tensor given as a shard: (elements that the files hold, elements of the whole, a save of it)}."""
    kept: dict[tuple[str, str], tuple[str, tuple[int, ...], int, int, Save]] = {}
    for save in saves:
        for key, entry in save.entries.items():
            if entry.kind == "dtensor" and entry.sharded and not save.together:
                own, offset = math.prod(entry.own), tuple(entry.offset)
                kept[save.to, key] = (key, offset, own, math.prod(entry.shape), save)
            elif entry.kind == "tensor" and (found := _shard_of(run, save.rank, key, entry)) is not None:
                kept[save.to, key] = (found[0], (save.rank,), found[1], found[2], save)
    out: dict[str, tuple[int, int, Save]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for name, offset, own, whole, save in kept.values():
        if (name, offset) not in seen:
            seen.add((name, offset))
            out[name] = (out.get(name, (0, 0, save))[0] + own, whole, save)
    return out


def _shard_of(run: Run, rank: int, key: str, entry: SavedEntry) -> tuple[str, int, int] | None:
    """(parameter, elements here, elements in all) if this plain tensor is a rank's part of a sharded parameter."""
    name = parameter_of(run, key)
    mine = next((e for e in run.parameters.get(name or "", []) if e.rank == rank), None)
    if name is None or mine is None or not mine.sharded or mine.local_numel == mine.numel:
        return None
    same = math.prod(entry.shape) == mine.local_numel and len(entry.shape) == len(mine.shape)
    return (name, mine.local_numel, mine.numel) if same else None


@detector("local-shard-export")
def local_shard_export(flow: Flow) -> Iterator[Hit]:
    for event in flow.ops("torch.save"):
        path = event.arg(1, "f")
        if not event.args or flow.partial or shared(event.args[0]):
            continue
        everywhere = flow.whole and path is not None and not any(p.rank or p.kind == "free" for p in reach(path))
        if not event.on_some_ranks and (not everywhere or any(g.test.rank for g in event.guards)):
            continue
        for part in reach(event.args[0]):
            made = _shards(flow, part)
            if made is not None:
                who = (
                    "one rank writes that rank's shards only"
                    if event.on_some_ranks
                    else "every rank writes its shards into one file"
                )
                yield flow.hit(
                    "local-shard-export", f"{text(event.node)}: {who} ({text(made.node)} holds DTensors)", event
                )
                break


def _shards(flow: Flow, part: Value) -> Event | None:
    """The call that made a state dict of shards."""
    event: Event | None = part.event if part.kind == "made" else None
    if event is None:
        return None
    if part.name in ("dsd.get_model_state_dict", "dsd.get_state_dict"):
        plain = "options" not in event.kwargs and not event.open and bool(event.args)
        return event if plain and flow.managed_by(event.args[0], event) is not None else None
    if part.name == "state_dict" and event.on is not None and flow.managed_by(event.on, event) is not None:
        return event
    return None
