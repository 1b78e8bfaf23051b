"""Meshes of wrapped modules, ties, parameters added after sharding, shards, DTensors that the
script makes itself.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...trace.events import FromLocal, Late, NamedMesh, Place, ShardedInput, Shards, Tie, Ties, Wrap
from ...trace.origin import within_torch
from ..compat.groups import managed, slots
from ..compat.tensors import data_mesh, layout, local, mesh_of, own_parameters
from ..dispatcher import Call
from ..frames import caller
from ..measures import shard_digest
from ..session import Session

_MARK = "_seen_by_fully_shard"
_MESHES = 32  # named meshes that are recorded
_JOINED = 256  # calls of `DTensor.from_local` that are recorded

_Owner = tuple[
    weakref.ref[nn.Module], str, Place | None
]  # module, name of its parameter, line of `fully_shard`


class Wrapping:
    """What is kept of wrapped modules between two events of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # mark of a parameter -> its owners at the time of sharding
        self.owners: dict[int, list[_Owner]] = {}
        self.sharded: weakref.WeakKeyDictionary[nn.Module, Place | None] = (
            weakref.WeakKeyDictionary()
        )
        self.known: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.ties: list[list[_Owner]] = []
        self.sharded_input = False

    def wrapped(self, modules: list[nn.Module], options: dict[str, Any]) -> None:
        """`fully_shard` is about to be applied."""
        line = self.session.here()
        explicit = options.get("dp_mesh_dims") is not None
        self.session.write(
            Wrap(mesh=mesh_of(data_mesh(options)), explicit_dims=explicit, at_line=line)
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
                    self.owners.setdefault(self._mark(param), []).append(
                        (weakref.ref(owner), name, line)
                    )
        self._find_ties()

    def _mark(self, param: torch.Tensor) -> int:
        """A number unique to this object: an id can be reused, and a weak reference would forbid
        `swap_tensors`.
        """
        mark: int | None = getattr(param, _MARK, None)
        if mark is None:
            mark = len(self.owners) + 1
            setattr(param, _MARK, mark)
        return mark

    def _find_ties(self) -> None:
        for owners in self.owners.values():
            places = {
                (id(ref()), name): (ref, name, line)
                for ref, name, line in owners
                if ref() is not None
            }
            if len(places) > 1 and not any(_places(tie) == set(places) for tie in self.ties):
                self.ties = [tie for tie in self.ties if not _places(tie) < set(places)]
                self.ties.append(list(places.values()))

    def adopted(self, root: nn.Module, own: str) -> None:
        """A root is called for the first time: which parameters of it were tied, or added after it
        was sharded.
        """
        ties = self._ties_in(root)
        if ties and isinstance(root, FSDPModule):
            self.session.write(Ties(ties=ties, at_line=self.session.here()))
        self._late(root, own)
        if self.session.request.mode != "ddp":
            digests = {own + slot.name: shard_digest(local(slot.param)) for slot in slots(root)}
            self.session.write(Shards(digests=digests))

    def _ties_in(self, root: nn.Module) -> list[Tie]:
        names = {id(module): name for name, module in root.named_modules()}
        found = []
        for tie in self.ties:
            inside = [
                (m, name, line)
                for ref, name, line in tie
                if (m := ref()) is not None and id(m) in names
            ]
            if len(inside) > 1:
                tied = [f"{names[id(m)]}.{name}".lstrip(".") for m, name, _ in inside]
                objects = {id(own_parameters(m).get(name)) for m, name, _ in inside}
                found.append(Tie(names=tied, parameters=len(objects), line=inside[-1][2]))
        return found

    def _late(self, root: nn.Module, own: str) -> None:
        # the outermost sharded module: the model of an adapter contains it
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

        Not in a backward: this check calls an operator, and selective checkpointing raises at one
        that the first forward did not call.
        """
        if self.session.progress.in_backward or self.sharded_input:
            return
        if any(layout(value, 0).sharded for value in given()):
            self.sharded_input = True
            self.session.write(ShardedInput())

    def joined(self, call: Call) -> None:
        """The shape that the script's own `DTensor.from_local` gives a tensor; torch's own calls do
        not count.
        """
        if not within_torch(caller().f_code.co_filename) and self.session.first(
            "from_local", _JOINED
        ):
            shape, own = list(call.result.shape), list(local(call.result).shape)
            ranks, here = call.result.device_mesh.mesh.flatten().tolist(), self.session.here()
            self.session.write(FromLocal(shape=shape, local=own, ranks=ranks, at_line=here))

    def mesh_made(self, call: Call) -> None:
        """A device mesh was made, by the script or as a part of another one."""
        mesh = call.args[0]
        made = mesh_of(mesh) if mesh.ndim > 1 and mesh.mesh_dim_names else None
        if made is not None and self.session.first("named_mesh", _MESHES):
            self.session.write(NamedMesh(mesh=made))


def install(session: Session) -> None:
    watch = Wrapping(session)
    session.around("torch.distributed.device_mesh:DeviceMesh.__init__", after=watch.mesh_made)
    session.subscribe("shard", watch.wrapped)
    session.subscribe("adopt", watch.adopted)
    session.subscribe("call", watch.called)
    session.around("torch.distributed.tensor:DTensor.from_local", after=watch.joined)


def _places(tie: list[_Owner]) -> set[tuple[int, str]]:
    return {(id(ref()), name) for ref, name, _ in tie}
