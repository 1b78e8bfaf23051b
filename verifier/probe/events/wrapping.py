"""What is wrapped on which mesh, ties, parameters that come late, shards, tensors that the script joins itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...trace.events import FromLocal, Late, Place, ShardedInput, Shards, Tie, Ties, Wrap
from ...trace.origin import within_torch
from ..compat.groups import managed
from ..compat.tensors import data_mesh, layout, local, mesh_of, own_parameters, slots
from ..dispatcher import Call
from ..frames import caller
from ..measures import shard_digest
from ..session import Session

_MARK = "_seen_by_fully_shard"
_JOINED = 256

_Owner = tuple[weakref.ref[nn.Module], str, Place | None]  # module, name of its parameter, line of `fully_shard`


class Wrapping:
    """What is remembered of wrapped modules between two events of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.owners: dict[int, list[_Owner]] = {}  # mark of a parameter -> where it was at the time of sharding
        self.sharded: weakref.WeakKeyDictionary[nn.Module, Place | None] = weakref.WeakKeyDictionary()
        self.known: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.ties: list[list[_Owner]] = []
        self.sharded_input = False
        self.joined_calls = 0

    def wrapped(self, modules: list[nn.Module], options: dict[str, Any]) -> None:
        """`fully_shard` is about to be applied."""
        line = self.session.here()
        self.session.write(
            Wrap(mesh=mesh_of(data_mesh(options)), explicit_dims=options.get("dp_mesh_dims") is not None, at_line=line)
        )
        ignored = {id(p) for p in options.get("ignored_params") or ()}
        for module in modules:
            held = managed(module)
            self.sharded[module] = line
            for owner in module.modules():
                self.known.setdefault(owner, set()).update(own_parameters(owner))
                for name, param in own_parameters(owner).items():
                    if param is None or id(param) in ignored or (id(owner), name) in held:
                        continue
                    self.owners.setdefault(self._mark(param), []).append((weakref.ref(owner), name, line))
        self._find_ties()

    def _mark(self, param: torch.Tensor) -> int:
        """A number that this object alone has: ids come back, and a weak reference would forbid `swap_tensors`."""
        mark: int | None = getattr(param, _MARK, None)
        if mark is None:
            mark = len(self.owners) + 1
            setattr(param, _MARK, mark)
        return mark

    def _find_ties(self) -> None:
        for owners in self.owners.values():
            places = {(id(ref()), name): (ref, name, line) for ref, name, line in owners if ref() is not None}
            if len(places) > 1 and not any(_places(tie) == set(places) for tie in self.ties):
                self.ties = [tie for tie in self.ties if not _places(tie) < set(places)]
                self.ties.append(list(places.values()))

    def adopted(self, root: nn.Module, own: str) -> None:
        """A root is called for the first time: what of it was tied, and what came after it was sharded."""
        ties = self._ties_in(root)
        if ties and isinstance(root, FSDPModule):
            self.session.write(Ties(ties=ties, at_line=self.session.here()))
        self._late(root, own)
        if not self.session.stand_in:
            digests = {own + slot.name: shard_digest(local(slot.param)) for slot in slots(root)}
            self.session.write(Shards(digests=digests))

    def _ties_in(self, root: nn.Module) -> list[Tie]:
        names = {id(module): name for name, module in root.named_modules()}
        found = []
        for tie in self.ties:
            inside = [(m, name, line) for ref, name, line in tie if (m := ref()) is not None and id(m) in names]
            if len(inside) > 1:
                found.append(
                    Tie(
                        names=[f"{names[id(m)]}.{name}".lstrip(".") for m, name, _ in inside],
                        parameters=len({id(own_parameters(m).get(name)) for m, name, _ in inside}),
                        line=inside[-1][2],
                    )
                )
        return found

    def _late(self, root: nn.Module, own: str) -> None:
        # the model of an adapter is above what was sharded
        top = next((module for module in root.modules() if module in self.sharded), None)
        if top is None:
            return
        held, below = managed(root), {id(module) for module in top.modules()}
        late = [
            own + f"{prefix}.{name}".lstrip(".")
            for prefix, module in root.named_modules()
            for name, param in own_parameters(module).items()
            if param is not None
            and id(module) in below
            and (id(module), name) not in held
            and name not in self.known.get(module, ())
            and not layout(param, 0).sharded
        ]
        if late:
            self.session.write(Late(names=late, at_line=self.sharded[top]))

    def called(self, module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        """A root is called: is it given a DTensor?

        Not in a backward: selective checkpointing raises at an operator that the first forward did not call, and to look is to call one.
        """
        if self.sharded_input or self.session.in_backward:
            return
        if any(layout(value, 0).sharded for value in given()):
            self.sharded_input = True
            self.session.write(ShardedInput())

    def joined(self, call: Call) -> None:
        """The shape that the script's own `DTensor.from_local` gives a tensor; torch's own calls are left out."""
        if self.joined_calls < _JOINED and not within_torch(caller().f_code.co_filename):
            self.joined_calls += 1
            made = call.result
            self.session.write(
                FromLocal(
                    shape=list(made.shape),
                    local=list(local(made).shape),
                    ranks=made.device_mesh.mesh.flatten().tolist(),
                    at_line=self.session.here(),
                )
            )


def install(session: Session) -> None:
    """Subscribe to notices of sharding and of roots, and to `DTensor.from_local`."""
    watch = Wrapping(session)
    session.subscribe("shard", watch.wrapped)
    session.subscribe("adopt", watch.adopted)
    session.subscribe("call", watch.called)
    session.dispatcher.around("torch.distributed.tensor:DTensor.from_local", after=watch.joined)


def _places(tie: list[_Owner]) -> set[tuple[int, str]]:
    return {(id(ref()), name) for ref, name, _ in tie}
