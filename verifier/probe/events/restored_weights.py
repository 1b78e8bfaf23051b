"""What a script copies or averages shares the memory of the parameters: weights that are
overwritten, tried in a forward and copied onto themselves, averages that are moved towards
themselves, and weights of before some steps that are put back from their own memory.
"""

from collections.abc import Callable

import torch

from ...trace.events import OntoItself, Place, PutBack
from ..compat.tensors import in_memory
from ..dispatcher import Call
from ..frames import caller
from ..session import Session


class Swaps:
    """What the script's own copies do to the parameters between two optimizer steps."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.names: dict[int, str] = {}  # of the parameters, by the address of the shard
        # where a parameter got other values since the last step
        self.over: dict[int, Place | None] = {}
        # the same, for those with which a model has run since
        self.tried: dict[int, Place | None] = {}
        self.averaged: set[str] = set()  # the names of those that were averaged with themselves
        self.others: set[tuple[str, int]] = set()  # lines that copy other tensors into parameters
        # line and address of a copy onto itself: before which step
        self.own: dict[tuple[str, int, int], int] = {}

    def forget(self, *stepped: object) -> None:
        """An optimizer has stepped: what was overwritten before belongs to its training."""
        self.names = {
            in_memory(slot.param).data_ptr(): slot.name for slot in self.session.all_slots()
        }
        self.over, self.tried = {}, {}

    def called(self, *call: object) -> None:
        """A model is called with what the parameters hold now."""
        self.tried |= self.over
        self.over = {}

    def copies(self, call: Call) -> None:
        """One tensor is copied into another."""
        if len(call.args) > 1:
            self.copy(call.args[0], call.args[1])

    def copies_all(self, call: Call) -> None:
        """The same, for lists of tensors."""
        for to, source in zip(call.given(0, "self"), call.given(1, "src"), strict=False):
            self.copy(to, source)

    def averages(self, op: str) -> Callable[[Call], None]:
        """One tensor, or each of a list, is moved by a positive share towards another, or gets one
        added.
        """

        def average(call: Call) -> None:
            # Within an optimizer's step tensors are changed by the optimizer, not by the script.
            if not self.names or self.session.progress.in_step or len(call.args) < 2:
                return
            several = op.startswith("_foreach")
            alpha = call.kwargs.get("alpha", 1.0)
            # A share between 0 and 1 is added to an average; any other factor is an update (exam
            # round 10, missed: an average in the memory of the weights).
            if "add" in op and not (isinstance(alpha, float | int) and 0 < alpha <= 1):
                return
            for to, source in zip(*call.args[:2], strict=False) if several else [call.args[:2]]:
                if isinstance(to, torch.Tensor) and isinstance(source, torch.Tensor):
                    address = in_memory(to).data_ptr()
                    if (
                        address
                        and address == in_memory(source).data_ptr()
                        and (name := self.names.get(address, ""))
                    ):
                        self._onto_itself(name, op)

        return average

    def _onto_itself(self, name: str, op: str) -> None:
        if name not in self.averaged:
            self.averaged.add(name)
            self.session.write(
                OntoItself(
                    step=self.session.progress.step_number(),
                    name=name,
                    op=op,
                    at_line=self.session.here(),
                )
            )

    def copy(self, to: object, source: object) -> None:
        if not self.names or self.session.progress.in_step:
            return
        if not isinstance(to, torch.Tensor) or not isinstance(source, torch.Tensor):
            return
        address = in_memory(to).data_ptr()
        if not address or address not in self.names:
            return
        name, at = self.names[address], self.session.here()
        step = self.session.progress.step_number()
        line = (at.file, at.line) if at is not None else ("", 0)
        if in_memory(source).data_ptr() != address:
            self.tried.pop(address, None)
            self.over[address] = at
            self.others.add(line)
        elif address in self.tried:
            self.session.write(
                PutBack(name=name, step=step, over=self.tried.pop(address), at_line=at)
            )
        elif address not in self.over and caller().f_code.co_filename == line[0]:
            before = self.own.setdefault((*line, address), step)
            if (
                # A line that also copies other tensors shares the best of several models: a copy
                # onto itself is one of them (exam round 13, missed: weights that are put back from
                # their own memory).
                before < step and line not in self.others
            ):  # not the best of several models, copied to all
                self._onto_itself(name, "copy_")


def install(session: Session) -> None:
    """Subscribe to steps, forwards and copies, in the run that is judged."""
    if session.request.mode != "fsdp":
        return
    swaps = Swaps(session)
    session.subscribe("stepped", swaps.forget)
    session.subscribe("updated", swaps.forget)
    session.subscribe("call", swaps.called)
    session.around("torch:Tensor.copy_", before=swaps.copies)
    session.around("torch:_foreach_copy_", before=swaps.copies_all)
    for op in ("lerp_", "add_"):
        session.around(f"torch:Tensor.{op}", before=swaps.averages(op))
        session.around(f"torch:_foreach_{op}", before=swaps.averages(f"_foreach_{op}"))
