import math
import re
from collections.abc import Iterator
from dataclasses import replace

from ...analysis.saves import Save
from ...source.flow_queries import GETTERS, shared, text
from ...source.values import Value, reach
from ...trace.events import Checkpoint, SavedEntry
from ..base import Event, Evidence, Finding, Flow, Hits, Run, count, some
from ._saved import SaveRule, parameter_of


class LocalShardExport(SaveRule):
    """A parameter is saved whole, or with all of its shards.

    Why: `torch.save` of a DTensor or of `to_local()` writes one rank's part. If only rank 0 saves,
    or all ranks save to one file, the rest of the model is lost; the file has the right keys, and
    the loss shows only when it is loaded.
    Wrong:
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
    Right:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, path)
    Fix: Make a full state dict on all ranks and write it on rank 0, or use DCP; shards need one
    file for each rank.
    Source: axolotl#1947; huggingface/accelerate#3487; RLinf PR#1569; verl PR#7612; Megatron-LM
    PR#4888.
    """

    kind = "save to a file"
    one_rank = "it holds whole tensors"

    def about(self, save: Save) -> bool:
        return bool(save.to)

    def judge(self, evidence: Evidence) -> Finding:
        found, resume = super().judge(evidence), evidence.resume
        loads = {record.op for record in resume.all(Checkpoint)} if resume is not None else set()
        # A resume that reads such files, and nothing of DCP's, gets what they hold.
        if found.status == "fail" and "torch.load" in loads and "load" not in loads:
            return replace(found, explains=("load-without-set",))
        return found

    def check(self, run: Run, saves: list[Save]) -> Finding:
        everywhere = _stored_shards(
            run, saves
        )  # ranks may write the parts of one checkpoint at different steps
        for after in sorted({save.after for save in saves}):
            stored = _stored_shards(run, [save for save in saves if save.after == after])
            lost = {
                n: part
                for n, part in stored.items()
                # Ranks of an asynchronous saver write their files at different steps: all files of
                # the run together hold the whole tensor (exam round 4 m_01_async_saver twin).
                if part[0] < part[1] and everywhere[n][0] < part[1]
            }
            if lost:
                name, (held, whole, save) = next(iter(lost.items()))
                writers = {s.rank for s in saves if s.to == save.to}
                how = "one rank" if len(writers) == 1 else "several ranks to one file"
                which = (
                    f"{count(len(lost), 'tensor')} of this save ({some(lost)}) without all shards"
                )
                what = f"{name}: {how} wrote {held} of its {whole} elements after step {after}"
                return self.failed(f"{what}; {which}", save.line)
        return self.passed(
            f"{count(len(saves), 'save')} to files wrote whole tensors, or all of their shards"
        )

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops("torch.save"):
            path = event.arg(1, "f")
            if not event.args or flow.partial or shared(event.args[0]):
                continue
            everywhere = (
                flow.whole
                and path is not None
                # A path with the rank in it, or from outside, is a file of each rank: shards there
                # are right (zoo/checkpoint_per_rank_files.py).
                and not any(p.rank or p.kind == "free" for p in reach(path))
            )
            if not event.on_some_ranks and (
                not everywhere or any(g.test.rank for g in event.guards)
            ):
                continue
            made = next(
                (
                    made
                    for part in _written_out(event.args[0])
                    if (made := _shards(flow, part)) is not None
                ),
                None,
            )
            if made is not None:
                who = (
                    "one rank writes only its own"
                    if event.on_some_ranks
                    else "every rank writes its own to one file"
                )
                yield f"{text(event.node)}: {text(made.node)} holds shards, and {who}", event


def _stored_shards(run: Run, saves: list[Save]) -> dict[str, tuple[int, int, Save]]:
    """{tensor given as a shard: (elements that the files hold, elements of the whole, a save of
    it)}.
    """
    kept: dict[tuple[str, str], tuple[str, tuple[int, ...], int, int, Save]] = {}
    for save in saves:
        for key, entry in save.entries.items():
            if entry.kind == "dtensor" and entry.sharded and not save.together:
                kept[save.to, key] = (
                    key,
                    tuple(entry.offset),
                    math.prod(entry.own),
                    math.prod(entry.shape),
                    save,
                )
            elif (
                entry.kind == "tensor"
                and (found := _shard_of(run, save.rank, key, entry)) is not None
            ):
                kept[save.to, key] = (found[0], (save.rank,), found[1], found[2], save)
    out: dict[str, tuple[int, int, Save]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for name, offset, own, whole, save in kept.values():
        if (name, offset) not in seen:
            seen.add((name, offset))
            out[name] = (out.get(name, (0, 0, save))[0] + own, whole, save)
    return out


def _shard_of(run: Run, rank: int, key: str, entry: SavedEntry) -> tuple[str, int, int] | None:
    """(parameter, elements here, elements in all) if this plain tensor is a rank's part of a
    sharded parameter.
    """
    name = parameter_of(run, key) or ""
    mine = next((e for e in run.parameters.get(name, []) if e.rank == rank), None)
    # A tensor with fewer rows than ranks lies whole on one rank and is empty on the others: the one
    # file holds all of it.
    if mine is None or not mine.sharded or mine.local_numel in (0, mine.numel):
        return None  # all of it is on one rank
    # A flat tensor with as many elements as the shard has is something else (a flattened whole of
    # another parameter).
    same = math.prod(entry.shape) == mine.local_numel and len(entry.shape) == len(mine.shape)
    tail = "." + re.sub(r"^model\d+\.", "", name)
    # in other models
    others = (held[0] for one, held in run.parameters.items() if f".{one}".endswith(tail))
    # A whole weight of one model may have the shape of a shard of another model's weight of the
    # same name: it is no shard (exam round 5 r_02_twin_critics twin).
    if any(other.shape == list(entry.shape) for other in others):
        return None
    return (name, mine.local_numel, mine.numel) if same else None


def _written_out(value: Value) -> Iterator[Value]:
    """What goes into a file: a value and its parts, not what a state dict is made of, or what is
    counted.
    """
    queue, seen = [value], {id(value)}
    while queue:
        current = queue.pop()
        yield current
        # `len(model.state_dict())` writes a number, and torch's getters return whole tensors if
        # asked: what they are made of is not written (exam rounds 1 to 7, linted right scripts).
        whole = current.kind == "made" and current.name in (*GETTERS, "builtins.len")
        owner = (
            [current.owner]
            if current.owner is not None and current.kind in ("attr", "item")
            else []
        )
        inside = [part for part in (*current.parts, *owner) if not whole and id(part) not in seen]
        queue += inside
        seen |= {id(part) for part in inside}


def _shards(flow: Flow, part: Value) -> Event | None:
    """The call that made a state dict of shards."""
    event: Event | None = part.event if part.kind == "made" else None
    model = event.on if event is not None and part.name == "state_dict" else None
    if (
        event is not None
        and part.name in GETTERS[:2]
        and "options" not in event.kwargs
        and not event.open
    ):
        model = next(iter(event.args), None)
    return (
        event
        if event is not None and model is not None and flow.managed_by(model, event) is not None
        else None
    )
