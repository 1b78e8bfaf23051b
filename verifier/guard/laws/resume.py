"""Resume: what comes back from a checkpoint is what was saved, on any number of ranks, and the
samples go on.

A save leaves a sealed record (`records.py`). A process that loads before its first step is held
against the record: weights and optimizer state before that step, buffers before its first forward.
What the run that went on after the save did next (settings, generators, samples) is added to the
record as soon as it is known.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...analysis.wording import some
from ...probe.bit_sketch import added, combined, sketch
from ...probe.dispatcher import Call
from ...probe.events.checkpoints import DCP, path_of
from ...probe.save_contents import leaves
from ..context import Context
from ..journal import Breach
from ..measured import Measured
from ..records import Record, Records, inode_of
from ..scene import Piece, contributes
from . import Law, Posts

LARGEST = 1 << 26  # bytes that all ranks leave of a save; of more only one number for each part
_MOVES = (".lr", ".last_epoch")  # settings that a schedule may set after a save


class Resume(Law):
    """Records of saves, and what a load before the first step brings back."""

    name = "resume-as-saved"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.records = Records(context.settings.out)
        self.record: Record | None = None  # of what this process has loaded
        self._saves = 0
        self._inside = 0  # of functions that load or save
        self._contributes: dict[str, bool] = {}  # whether this rank's part of a tensor counts
        self._buffers: dict[str, torch.Tensor] = {}  # sketches before the first forward
        self._random: str | None = None  # state of the generators before the first forward
        self._after: list[dict[str, Any]] = []  # what followed saves of this process
        self._waiting: dict[str, Any] | None = None  # a save after which nothing has followed yet

    def install(self) -> None:
        around = self.context.dispatcher.around
        for name in ("save", "async_save", "load"):
            around(f"{DCP}:{name}", before=self._enter, after=self._done_with(name))
        for name in ("save", "load"):
            around(f"torch:{name}", after=self._done_with(f"torch.{name}"))

    def _enter(self, call: Call) -> Any:
        self._inside += 1

        def leave() -> None:
            self._inside -= 1

        return leave

    def _done_with(self, operation: str) -> Any:
        def done(call: Call) -> None:
            path = path_of(operation, call)
            by_dcp = self._inside > 0 and operation.startswith("torch.")
            if by_dcp or not path:
                return
            if operation.endswith("load"):
                self._loaded(path)
            elif operation == "torch.save":
                self._saved_file(path, call.given(0, "obj"))
            else:
                self._saved(path)

        return done

    def forward(self, module: nn.Module, given: list[torch.Tensor]) -> None:
        self._random = self._random or _generators()
        if self.context.began or self.record is None:
            return
        for piece in self.context.scene.buffers():
            if piece.name not in self._buffers and (bits := sketch(piece.tensor)) is not None:
                self._buffers[piece.name] = bits

    def stepping(self, optimizer: Optimizer, due: bool) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._after.append({**waiting, "settings": self.context.scene.settings()})

    def begin(self, measured: Measured) -> None:
        if self.record is None:
            return
        for name, bits in self._buffers.items():
            measured.take("before", name, bits)
        known = self.context.scene.slots()
        scene = self.context.scene
        self._sort([*scene.weights(known), *scene.states(known), *scene.averages()])
        measured.values["resume"] = {
            "settings": self.context.scene.settings(),
            "trainable": [slot.name for slot in known if slot.param.requires_grad],
            "random": self._random,
            "draws": self._random != _generators(),
        }

    def measure(self, measured: Measured) -> None:
        measured.values["after"], self._after = self._after, []

    def _saved(self, path: str) -> None:
        if self.context.began is None:
            return  # a process that writes for another, or weights that no step has changed
        self._saves += 1
        step, scene = self.context.step, self.context.scene
        measured = Measured("save", step, label=str(self._saves))
        known = scene.slots()
        pieces = [*scene.weights(known), *scene.states(known), *scene.buffers(), *scene.averages()]
        self._sort(pieces)
        with torch.no_grad():
            for piece in pieces:
                if (bits := sketch(piece.tensor)) is not None:
                    measured.take("bits", f"{piece.part}/{piece.name}", bits)
        measured.values["save"] = self._about(path, known)
        measured.values["drawn"] = [self._random or "", _generators()]
        self._waiting = {"path": path, "step": step}
        self.context.hand_over(measured)

    def _saved_file(self, path: str, content: object) -> None:
        """A file of one rank: whole tensors under the names of parameters, or with a prefix."""
        if self.context.began is None:
            return
        known = self.context.scene.slots()
        names = {slot.name: tuple(slot.param.shape) for slot in known}
        measured = Measured("file", self.context.step, label=path)
        with torch.no_grad():
            for key, value in leaves(content):
                if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                    name = _suffix(key, names)
                    whole = name and tuple(value.shape) == names[name] and value.numel()
                    if whole and (bits := sketch(value)) is not None:
                        measured.take("bits", f"weights/{name}", bits)
        if measured.holds("bits"):
            measured.values["save"] = self._about(path, known)
            self.context.hand_over(measured)

    def _about(self, path: str, known: list[Any]) -> dict[str, Any]:
        return {
            "path": path,
            "inode": inode_of(path),
            "settings": self.context.scene.settings(),
            "trainable": [slot.name for slot in known if slot.param.requires_grad],
        }

    def _loaded(self, path: str) -> None:
        self.context.loads += 1
        if self.context.began:
            return
        try:
            record = self.records.of(path)
        except ValueError as error:
            self.context.journal.note(str(error))
            return
        if record is None:
            return
        self.record, self.context.base = record, record.step
        if self.context.rank == 0:
            self.context.epoch.go_on(record, self.context.journal.path)

    def _sort(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._contributes[f"{piece.part}/{piece.name}"] = contributes(
                piece.tensor, self.context.rank
            )

    def local(self, measured: Measured) -> Iterable[Breach]:
        if measured.kind == "file":
            about = measured.values["save"]
            found = {n.partition("/")[2]: int(v) for n, v in measured.numbers["bits"].items()}
            self._write(measured, about, {"weights": found})
        return ()

    def post(self, measured: Measured) -> dict[str, Any]:
        if measured.kind == "check":
            return {"after": measured.values["after"]} if measured.values["after"] else {}
        if measured.kind == "begin" and self.record is None:
            return {}
        own: dict[str, dict[str, int]] = {}
        for name, value in measured.numbers.get("bits", {}).items():
            if self._contributes.get(name, False):
                part, _, rest = name.partition("/")
                own.setdefault(part, {})[rest] = int(value)
        for name, value in measured.numbers.get("before", {}).items():
            if self.context.rank == 0:
                own.setdefault("buffers", {})[name] = int(value)
        size = sum(len(name) + 24 for some in own.values() for name in some)
        if size * self.context.world > LARGEST:
            own = {part: {"*": combined(some)} for part, some in own.items()}
        drawn = {"drawn": measured.values["drawn"]} if measured.kind == "save" else {}
        return {"state": own, **drawn, **measured.values.get("resume", {})}

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        if measured.kind == "check":
            self._add_what_followed(posts)
            return
        state: dict[str, dict[str, int]] = {}
        for post in posts.values():
            for part, own in post.get("state", {}).items():
                state[part] = added(state.get(part, {}), own)
        if len(posts) < self.context.world:
            missing = sorted({*range(self.context.world)} - {*posts})
            self.context.journal.note(
                f"step {measured.step}: ranks {missing[:8]} were late; the state at this"
                f" {measured.kind} is not held"
            )
        elif measured.kind == "save":
            drawn = {str(rank): post["drawn"] for rank, post in posts.items()}
            self._write(measured, {**measured.values["save"], "drawn": drawn}, state)
        elif self.record is not None:
            yield from self._against(self.record, measured, state, posts)

    def _write(
        self, measured: Measured, about: dict[str, Any], state: dict[str, dict[str, int]]
    ) -> None:
        epoch = self.context.epoch
        seen, share = epoch.sample()
        record = Record(
            path=about["path"],
            step=measured.step,
            world=self.context.world,
            inode=about["inode"] or inode_of(about["path"]),
            sketches={
                part: {name: f"{value:x}" for name, value in some.items()}
                for part, some in state.items()
            },
            settings=about["settings"],
            trainable=about["trainable"],
            drawn=about.get("drawn", {}),
            epoch_rows=int(epoch.rows),
            seen=seen,
            share=share,
            versions={"torch": torch.__version__},
        )
        self.records.write(record)
        self.context.journal.write("save", step=measured.step, path=about["path"])

    def _add_what_followed(self, posts: Posts) -> None:
        """Complete the records of saves with what the run that went on did next."""
        for own in posts.get(0, {}).get("after", ()):
            record = self.records.of(own["path"])
            if record is not None and record.step == own["step"]:
                record.next_settings = own["settings"]
                self.records.write(record)

    def _against(
        self, record: Record, measured: Measured, state: dict[str, dict[str, int]], posts: Posts
    ) -> Iterator[Breach]:
        """What came back, against what was saved."""
        self.context.journal.write("resume", step=record.step, path=record.path, world=record.world)
        for part, saved in record.sketches.items():
            have = state.get(part, {})
            if "*" in have or "*" in saved:
                all_of = {n: int(v, 16) for n, v in saved.items()}
                saved = saved if "*" in saved else {"*": f"{combined(all_of):x}"}
                have = have if "*" in have else {"*": combined(have)}
            if part == "buffers":
                saved = {name: value for name, value in saved.items() if name in have}
            lost = sorted(name for name in saved if name not in have)
            changed = sorted(n for n, v in saved.items() if n in have and int(v, 16) != have[n])
            if lost and not have and part in ("weights", "averages"):
                self.context.journal.note(f"the resumed {part} have other names: not held")
                continue
            if lost:
                yield self._breach(record, lost, f"{part}: {some(lost, 1)} did not come back")
            if changed:
                yield self._breach(
                    record, changed, f"{part}: {some(changed, 1)} came back with other values"
                )
        own = posts[0]
        frozen = sorted({*record.trainable} - {*own["trainable"]})
        if frozen and len(frozen) < len(record.trainable):
            yield self._breach(record, frozen, f"{some(frozen, 1)} trained before, and do not now")
        yield from self._settings(record, own["settings"])
        if record.world == self.context.world and (other := other_generators(record, posts)):
            text = "the generators of the ranks, which the step draws from, came back otherwise"
            yield self._breach(record, ["generators"], text, other)

    def _settings(self, record: Record, now: dict[str, Any]) -> Iterator[Breach]:
        """Learning rates and other settings: as they were at the save, or in the step after it."""
        after = record.next_settings
        for name, then in record.settings.items():
            found = now.get(name)
            fits = (_plain(then), _plain(after[name])) if name in after else (_plain(then),)
            if name not in now or _plain(found) in fits:
                continue
            if not after and name.endswith(_MOVES):
                # A schedule may step between the save and the next step; it does not go back.
                back = name.endswith(_MOVES[1]) and found is not None and found < (then or 0)
                if not back:
                    continue
            expected = after.get(name, then)
            yield self._breach(record, [name], f"{name} is {found} and was {expected}")

    def _breach(
        self, record: Record, names: list[str], text: str, ranks: list[int] | None = None
    ) -> Breach:
        return self.breach(
            self.context.base,
            f"resumed from {record.path} (step {record.step}, {record.world} ranks): {text}",
            ranks=ranks or [],
            names=names,
            since=record.step,
            edit="save it, and load it before the first step",
            key=text,
        )


def other_generators(record: Record, posts: Posts) -> list[int]:
    """Ranks whose step draws from generators that begin again as in the process that saved, or
    are the same on all ranks and were not. (A loader that starts draws from a restored one.)
    """
    now = {rank: post.get("random") for rank, post in posts.items() if post.get("random")}
    drawn = {int(rank): states for rank, states in record.drawn.items()}
    alike = len({*now.values()}) == 1 < len({then for _, then in drawn.values()})
    return sorted(
        rank
        for rank, state in now.items()
        if posts[rank].get("draws")
        and rank in drawn
        and drawn[rank][1] != state
        and (alike or drawn[rank][0] == state)
    )


def _generators() -> str:
    """A digest of the default generators of this rank; of a GPU its state is on the host."""
    states = [torch.get_rng_state()]
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        states.append(cuda.get_rng_state())
    return " ".join(f"{zlib.crc32(one.numpy().tobytes()):x}" for one in states)


def _suffix(key: str, names: dict[str, Any]) -> str:
    """The parameter that a key of a file means: the longest name with which it ends."""
    parts = key.split(".")
    tails = (".".join(parts[at:]) for at in range(len(parts)))
    return next((tail for tail in tails if tail in names), "")


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    return json.loads(json.dumps(value))
