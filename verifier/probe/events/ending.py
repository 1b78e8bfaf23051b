"""What the script prints and writes behind its last step: in the survey run, and in one process
that makes all its steps too.

Both begin with the same weights. Behind the last step is what no backward or optimizer step
follows; what the same lines have printed between two steps belongs to the loop. Beside this a run
records its models, and nothing of its steps. With `reseed_after` the numbers that are drawn behind
that many optimizer steps are others: what depends on them is noise.
"""

import logging
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...trace.events import Final, Held, Place, Printed, Written
from .. import outputs
from ..compat.groups import slots
from ..dispatcher import Call, Leave
from ..measures import writes
from ..session import Session
from ..tensor_fingerprint import sketch
from ..watched import READABLE, read_file
from .backward import BACKWARD
from .models import Models

_PRINTS, _FILES, _TENSORS = 64, 16, 512
_LARGEST = 1 << 26  # bytes of a file that is read
_DEPTH = 6
_OTHER = 20_260_101  # a seed
_PLAIN = (str, int, float, bool, type(None))


class Ending:
    """What rank 0 has printed since the last step, and when that was."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last = time.time()
        self.depth = 0
        self.steps = 0  # of all optimizers
        self.written = 0  # how often the weights had been by the last of them
        self.printed: list[tuple[str, list[Place]]] = []
        self.between: set[tuple[tuple[str, int], ...]] = set()  # lines that print between steps

    def stepped(self, of: object, *arguments: Any) -> None:
        """A backward or an optimizer step: what was printed until now was not the end."""
        self.steps += isinstance(of, Optimizer)
        if isinstance(of, Optimizer):
            self.written = self._writes()
        if isinstance(of, Optimizer) and self.steps == self.session.request.reseed_after:
            random.seed(_OTHER)
            torch.manual_seed(_OTHER)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(_OTHER)
        self.last = time.time()
        self.between |= {_lines(stack) for _, stack in self.printed}
        self.printed = []

    def called(self, call: Call) -> Leave:
        """A module is called before the first step: of a model that is new, the initial weights are
        those of both runs.
        """
        session, models, module = self.session, self.session.one(Models), call.args[0]
        if self.depth == 0 and not (
            self.steps or session.progress.in_backward or models.holds(module)
        ):
            params = [slot.param for slot in slots(module)]
            if params and all(param.device.type != "meta" for param in params):
                models.adopt(module)
        self.depth += 1
        return self._left

    def _left(self) -> None:
        self.depth -= 1

    def destroys(self, call: Call) -> None:
        """The process group is destroyed: what training has made of the weights, unless the script
        has put others in their place.
        """
        # Weights that were written after the last step are not what training has made (the best are
        # put back).
        if self.steps and self._writes() != self.written:
            return
        with torch.no_grad():
            weights = {slot.name: sketch(slot.param) for slot in self.session.all_slots()}
        self.session.write(Final(weights=weights))

    def _writes(self) -> int:
        return writes(slot.param for slot in self.session.all_slots())

    def prints(self, call: Call) -> None:
        """`print` is called; a tensor is left out, since to show one may take all ranks."""
        if all(isinstance(item, _PLAIN) for item in call.args) and call.kwargs.get("file") in (
            None,
            sys.stdout,
            sys.stderr,
        ):
            self._note((call.kwargs.get("sep") or " ").join(map(str, call.args)))

    def logs(self, call: Call) -> None:
        """A record is logged."""
        record = call.args[1]
        args = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
        if record.levelno >= logging.INFO and all(isinstance(item, _PLAIN) for item in args):
            self._note(str(record.getMessage()))

    def _note(self, text: str) -> None:
        stack = self.session.frames.stack()
        if stack and self.session.frames.owns(stack[0].file) and len(self.printed) < _PRINTS:
            self.printed.append((text, stack))

    def ended(self) -> None:
        """The script has ended: report what it printed and wrote behind its last step."""
        for text, stack in self.printed:
            # Lines that also print between steps belong to the loop: their last text is not the
            # script's result.
            if _lines(stack) not in self.between:
                self.session.write(
                    Printed(text=text, steps=self.steps, stack=stack[1:], at_line=stack[0])
                )
        for name, file in list(self._files())[:_FILES]:
            values = dict(list(_tensors(read_file(file), "", 0))[:_TENSORS])
            if values:
                self.session.write(Written(path=name, steps=self.steps, values=values))

    def _files(self) -> Iterator[tuple[str, Path]]:
        """(path below the folder of `{checkpoint}` or the current one, file) of what was written
        since the last step.
        """
        folder, here = Path(self.session.request.checkpoint), Path.cwd()
        inside = [(folder, path) for path in sorted(folder.rglob("*"))] if folder.is_dir() else []
        for top, path in [*inside, *((here, path) for path in outputs.written())]:
            if path.suffix in READABLE and path.is_relative_to(top) and path.is_file():
                about = path.stat()
                if about.st_mtime >= self.last and about.st_size <= _LARGEST:
                    yield path.relative_to(top).as_posix(), path


def _lines(stack: list[Place]) -> tuple[tuple[str, int], ...]:
    return tuple((place.file, place.line) for place in stack)


def _tensors(value: Any, path: str, depth: int) -> Iterator[tuple[str, Held]]:
    if isinstance(value, torch.Tensor):
        if (
            type(value) in (torch.Tensor, nn.Parameter)
            and value.is_floating_point()
            and value.numel()
        ):
            yield (
                path,
                Held(
                    holder="file",
                    sketch=sketch(value.detach()),
                    numel=value.numel(),
                    dtype=str(value.dtype),
                ),
            )
    elif isinstance(value, Mapping | list | tuple) and depth < _DEPTH:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, f"{path}.{key}" if path else str(key), depth + 1)


def install(session: Session) -> None:
    """Every rank shares its initial weights; rank 0 reports its end."""
    ending = Ending(session)
    session.around("torch.nn:Module.__call__", before=ending.called)
    session.around("torch.distributed:destroy_process_group", before=ending.destroys)
    register_optimizer_step_post_hook(session.guarded(ending.stepped))
    if session.rank:
        return
    session.around(BACKWARD, after=ending.stepped)
    session.around("builtins:print", before=ending.prints)
    session.around("logging:Logger.handle", before=ending.logs)
    session.subscribe("ended", ending.ended)
