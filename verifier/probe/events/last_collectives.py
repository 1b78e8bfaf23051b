"""The last collectives that the script called: what each rank gives and takes, in elements.

Kept in `rank{r}.calls`, a ring of slots that are written before each call: a rank that gloo ends
with SIGABRT, or that hangs, can record nothing later. Collectives of FSDP itself are left out:
their sizes follow from the parameters.
"""

import functools
import json
import os
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...trace.reader import SLOT, SLOTS
from ..dispatcher import Call
from ..frames import caller
from ..session import Session

_DEPTH, _NAMES = 8, 24
_FSDP = f"{os.sep}distributed{os.sep}fsdp{os.sep}"
# The position of the group, where each rank brings one tensor of the same size ...
_ONE = {"all_reduce": 2, "broadcast": 2, "reduce": 3}
# ... and with it the arguments that a rank takes into and gives.
_TWO = {
    "all_gather": (2, "tensor_list", "tensor"),
    "all_gather_into_tensor": (2, "output_tensor", "input_tensor"),
    "reduce_scatter": (3, "output", "input_list"),
    "reduce_scatter_tensor": (3, "output", "input"),
    "all_to_all": (2, "output_tensor_list", "input_tensor_list"),
    "all_to_all_single": (4, "output", "input"),
}


class LastCollectives:
    """The ring of one rank."""

    def __init__(self, session: Session) -> None:
        path = session.writer.path.with_suffix(".calls")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._session = session
        self._process = os.getpid()
        self._made = 0
        self._of_group: dict[tuple[int, ...], int] = {}

    def called(self, call: Call, name: str) -> None:
        if _FSDP in caller().f_code.co_filename or os.getpid() != self._process:
            return
        group = call.given(_ONE[name] if name in _ONE else _TWO[name][0], "group")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        gives, takes = _sizes(call, name, len(ranks))
        number = self._of_group[ranks] = self._of_group.get(ranks, 0) + 1
        about = {"op": name, "order": self._made, "ranks": ranks, "number": number}
        about |= {"gives": gives, "takes": takes}
        frames = [*islice(self._session.frames.own(), _DEPTH)]
        about["frames"] = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
        text = json.dumps({**about, "values": [_values(frame) for frame in frames]})
        if len(text) >= SLOT:
            text = json.dumps({**about, "values": []})
        if len(text) < SLOT:
            os.pwrite(self._file, text.ljust(SLOT).encode(), self._made % SLOTS * SLOT)
            self._made += 1


def install(session: Session) -> None:
    """Keep them in runs of the script as it is."""
    if session.request.mode not in ("fsdp", "survey"):
        return
    last = LastCollectives(session)
    for name in (*_ONE, *_TWO):
        session.around(
            f"torch.distributed:{name}",
            before=functools.partial(last.called, name=name),
            optional=True,
        )


def _sizes(call: Call, name: str, ranks: int) -> tuple[list[int], list[int]]:
    """The elements given to and taken from each rank of the group."""
    if name in _ONE:
        size = call.given(0, "tensor").numel()
        return [size] * ranks, [size] * ranks
    _, taken, given = _TWO[name]
    splits = (None, None)
    if name == "all_to_all_single":
        splits = (call.given(3, "input_split_sizes"), call.given(2, "output_split_sizes"))
    return (
        _parts(call.given(1, given), ranks, splits[0], whole=name.startswith("all_gather")),
        _parts(call.given(0, taken), ranks, splits[1], whole=name.startswith("reduce_scatter")),
    )


def _parts(what: Any, ranks: int, splits: Any, whole: bool) -> list[int]:
    """The elements for each rank: of a list, by split sizes, of a tensor that each gets whole, or
    in equal parts.
    """
    if not isinstance(what, torch.Tensor):
        return [one.numel() for one in what]
    if splits:
        row = what[:1].numel() if what.ndim and what.shape[0] else 1
        return [int(rows) * row for rows in splits]
    return [what.numel() if whole else what.numel() // ranks] * ranks


def _values(frame: FrameType) -> dict[str, int | list[int]]:
    """The whole numbers and the shapes of tensors among the variables of a frame."""
    found: dict[str, int | list[int]] = {}
    for name, value in islice(frame.f_locals.items(), _NAMES):
        if type(value) is int:
            found[name] = value
        elif isinstance(value, torch.Tensor):
            found[name] = [*value.shape]
    return found
