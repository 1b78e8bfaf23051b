"""Replicas agree: ranks that hold the same part of the state hold the same bits."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...probe.bit_sketch import combined, sketch
from ..context import Context
from ..exchange import ASKING, DETAILS
from ..journal import Breach, of_ranks
from ..measured import Measured
from ..scene import ALIKE, Piece, placing, world_size
from . import Law, Posts

DIFFER = "differ"  # the word of the store: tensors of ALIKE that ranks hold apart
_KEPT = 4  # comparisons of which a rank keeps each tensor's sketch


BACKWARDS = "backwards by this step"

Sketches = dict[str, int]


class Replicas(Law):
    """Sketches of the state at each check.

    Tensors that a mesh places must agree between the ranks of that mesh that hold the same part.
    Others (DDP, buffers, a mesh of a part of the ranks) must agree if they once did: weights before
    the first step, the rest after it. Statistics that each rank keeps for itself, and experts of a
    rank, never did.
    """

    name = "replicas-agree"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # {step: {set of tensors: {"part/name": sketch}}}, for questions of rank 0
        self.kept: dict[int, dict[str, Sketches]] = {}
        # {"part/name": (set, identity) of each set that it is in}
        self._placed: dict[str, list[tuple[str, int]]] = {}
        self._apart: set[str] | None = None  # of ALIKE: what is not compared
        self._agreed: dict[tuple[str, str], int] = {}  # (set, part): when ranks last agreed
        self._backwards = 0  # at the same step the same on all ranks: none leaves a step out
        self._equal_weights: set[str] = set()  # of ALIKE: what all ranks began with

    def install(self) -> None:
        around = self.context.dispatcher.around
        scene = self.context.scene
        average = "torch.optim.swa_utils:AveragedModel.__init__"
        around(average, after=lambda call: scene.adopt_average(call.args[0]))
        around("torch.amp:GradScaler.__init__", before=lambda call: scene.scales(call.args[0]))
        schedule = "torch.optim.lr_scheduler:LRScheduler.__init__"
        around(schedule, before=lambda call: scene.schedules(call.args[0]))

    def backward(self, losses: list[torch.Tensor]) -> None:
        self._backwards += 1

    def begin(self, measured: Measured) -> None:
        scene = self.context.scene
        known = scene.slots()
        # Averages for the resume: often one rank alone has them.
        self._take(measured, [*scene.weights(known), *scene.states(known), *scene.averages()])

    def measure(self, measured: Measured) -> None:
        scene = self.context.scene
        known = scene.slots()
        self._take(measured, [*scene.weights(known), *scene.states(known), *scene.buffers()])
        measured.values["settings"] = {**scene.settings(), BACKWARDS: self._backwards}
        for name, scale in scene.loss_scales():
            measured.take("scale", name, scale)

    def _take(self, measured: Measured, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            found = sketch(piece.tensor)
            if found is not None:
                name = f"{piece.part}/{piece.name}"
                self._placed[name] = placing(piece, world_size())
                measured.take("bits", name, found)

    def post(self, measured: Measured) -> dict[str, Any]:
        if measured.kind in ("save", "file"):
            return {}
        sets: dict[str, Sketches] = defaultdict(dict)
        for name, value in measured.numbers.get("bits", {}).items():
            for which, _ in self._placed[name]:
                sets[which][name] = int(value)
        self._keep(measured.step, dict(sets))
        posted: dict[str, Any] = {"sets": {}}
        for which, sketches in sets.items():
            if which == ALIKE:
                if not self._knows_apart(measured, sketches, posted):
                    continue
                sketches = {n: v for n, v in sketches.items() if n not in (self._apart or ())}
            places = [dict(self._placed[name])[which] for name in sketches]
            identity = zlib.crc32(json.dumps(places).encode())
            own = {part: combined(some) for part, some in _by_part(sketches).items()}
            posted["sets"][which] = [identity, own]
        if "settings" in measured.values:
            posted["settings"] = measured.values["settings"]
            posted["scale"] = measured.numbers.get("scale", {})
        return posted

    def _knows_apart(self, measured: Measured, alike: Sketches, posted: dict[str, Any]) -> bool:
        """Whether it is known which of them ranks hold apart; else they are posted whole."""
        if measured.kind == "begin" or measured.step == self.context.first_check:
            weights = measured.kind == "begin"
            posted["whole"] = {
                name: [dict(self._placed[name])[ALIKE], value]
                for name, value in alike.items()
                if name.startswith("weights/") or not weights
            }
            return False
        if self._apart is None and (words := self.context.asked(DIFFER)):
            self._apart = set(words.split("\n"))
        return self._apart is not None

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        if measured.kind in ("save", "file"):
            return
        yield from self._apart_from_the_start(measured, posts)
        for which in sorted({one for post in posts.values() for one in post.get("sets", {})}):
            yield from self._compare(measured, which, posts)
        yield from self._numbers(measured, posts)

    def _apart_from_the_start(self, measured: Measured, posts: Posts) -> Iterator[Breach]:
        """Find the tensors of ALIKE that ranks hold apart, for all ranks to read."""
        whole = {rank: post["whole"] for rank, post in posts.items() if "whole" in post}
        if not whole:
            return
        held: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        for rank, sketches in whole.items():
            for name, (identity, value) in sketches.items():
                held[name][identity][rank] = value
        apart = {
            name: next(ranks for ranks in places.values() if len({*ranks.values()}) > 1)
            for name, places in held.items()
            if any(len({*ranks.values()}) > 1 for ranks in places.values())
        }
        if measured.kind == "begin":
            self._equal_weights = {name for name in held if name not in apart}
            return
        # A weight that all ranks began with, and that one step has moved apart, is a breach.
        moved = sorted(name for name in apart if name in self._equal_weights)
        self.context.ask(DIFFER, "\n".join(sorted({*apart} - {*moved})) or "-")
        if moved:
            odd = _minority({rank: str(value) for rank, value in apart[moved[0]].items()})
            yield self._breach(measured, moved, odd, measured.step - 1)

    def _compare(self, measured: Measured, which: str, posts: Posts) -> Iterator[Breach]:
        groups: dict[int, dict[int, dict[str, int]]] = defaultdict(dict)
        for rank, post in posts.items():
            if which in post.get("sets", {}):
                identity, parts = post["sets"][which]
                groups[identity][rank] = parts
        differ = [ranks for ranks in groups.values() if len({str(p) for p in ranks.values()}) > 1]
        if not differ:
            self._agreed[which, ""] = measured.step
            return
        details = self._ask_details(measured.step)
        for ranks in differ:
            have = {r: details[r].get(which, {}) for r in ranks if r in details}
            names = sorted(
                name
                for name in {n for some in have.values() for n in some}
                if len({some.get(name) for some in have.values()}) > 1
                and name not in (self._apart or ())
            )
            if names:
                odd = _odd(have, names[0])
            else:
                odd = sorted(ranks)
                names = sorted({p for parts in ranks.values() for p in parts})
            yield self._breach(measured, names, odd, self._agreed.get((which, "")))

    def _breach(
        self, measured: Measured, names: list[str], odd: list[int], since: int | None
    ) -> Breach:
        first = names[0].partition("/")[2] or names[0]
        kinds = sorted({name.partition("/")[0] for name in names})
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        who = f"{of_ranks(odd)} hold{'s' * (len(odd) == 1)}"
        when = "" if since is None else f"; all agreed at step {since}"
        return self.breach(
            measured.step,
            f"{who} other bits of {first}{others} ({', '.join(kinds)}) than the ranks with the same"
            f" part of it{when}",
            ranks=odd,
            names=[name.partition("/")[2] or name for name in names],
            since=since,
            edit="a rank alone: its memory or device, or code that only it runs"
            if len(odd) == 1
            else "",
            key=f"{sorted(odd)} {kinds[0]}",
        )

    def _numbers(self, measured: Measured, posts: Posts) -> Iterator[Breach]:
        """Settings of optimizers, schedules and loss scales: the same on all ranks."""
        for what in ("settings", "scale"):
            have = {rank: post[what] for rank, post in posts.items() if what in post}
            texts = {rank: str(value) for rank, value in have.items()}
            if len({*texts.values()}) <= 1:
                self._agreed[what, ""] = measured.step
                continue
            odd = _minority(texts)
            usual = next(value for rank, value in have.items() if rank not in odd)
            names = _different(have[odd[0]], usual)
            first = names[0] if names else what
            yield self.breach(
                measured.step,
                f"{of_ranks(odd)}: {first} is {have[odd[0]].get(first)}, others {usual.get(first)}",
                ranks=odd,
                names=names,
                since=self._agreed.get((what, "")),
                edit="decide on a value that all ranks have: reduce it over the ranks first",
                key=f"{what} {odd}",
            )

    def details(self, step: int) -> dict[str, Any] | None:
        return self.kept.get(step)

    def _ask_details(self, step: int) -> Posts:
        """The sketches of all ranks at a step, tensor by tensor, on rank 0."""
        exchange = self.context.exchange
        if exchange is None:
            return {}
        exchange.ask(DETAILS, str(step))
        exchange.leave(DETAILS, step, self.kept.get(step, {}))
        return exchange.collect(DETAILS, step, hurry=lambda: False, seconds=ASKING)

    def _keep(self, step: int, sets: dict[str, Sketches]) -> None:
        self.kept[step] = sets
        for old in sorted(self.kept)[:-_KEPT]:
            del self.kept[old]


def _by_part(sketches: Sketches) -> dict[str, Sketches]:
    found: dict[str, Sketches] = defaultdict(dict)
    for name, value in sketches.items():
        part, _, rest = name.partition("/")
        found[part][rest] = value
    return found


def _odd(have: dict[int, Sketches], name: str) -> list[int]:
    """The ranks that hold another value of a tensor than most; of two that differ, both."""
    return _minority({rank: str(sketches.get(name)) for rank, sketches in have.items()})


def _minority(texts: dict[int, str]) -> list[int]:
    values: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(texts.items()):
        values[text].append(rank)
    most = max(len(ranks) for ranks in values.values())
    usual = [ranks for ranks in values.values() if len(ranks) == most]
    if len(usual) > 1:
        return sorted(texts)
    return sorted(rank for ranks in values.values() if ranks is not usual[0] for rank in ranks)


def _different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
