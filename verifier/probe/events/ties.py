"""Tied parameters: which places of a model held one parameter before `fully_shard` or `to_empty`,
and hold several when it is trained.
"""

import functools
import weakref
from collections import defaultdict

from torch import nn

from ...trace.events import Place, Untied
from ..compat.tensors import own_parameters
from ..dispatcher import Call, Leave
from ..session import Session

Places = list[
    tuple[weakref.ref[nn.Module], str, str]
]  # module, name of its parameter, name from the outermost module


def install(session: Session) -> None:
    """Subscribe to what replaces parameters, and to the first call of a model."""
    ties: list[tuple[Places, str, Place | None]] = []

    def before(call: Call, by: str) -> Leave | None:
        given = call.given(0, "module")
        held: dict[int, Places] = defaultdict(list)
        for module in given if isinstance(given, list | tuple) else [given]:
            for prefix, part in module.named_modules():
                for name, param in own_parameters(part).items():
                    if param is not None:
                        held[id(param)].append(
                            (weakref.ref(part), name, f"{prefix}.{name}".lstrip("."))
                        )
        line = session.here()
        ties.extend((places, by, line) for places in held.values() if len(places) > 1)
        return None

    def adopted(root: nn.Module, name: str) -> None:
        inside = {id(module) for module in root.modules()}
        seen: set[tuple[str, ...]] = set()
        for places, by, line in ties:
            there = [
                (module, own, full)
                for ref, own, full in places
                if (module := ref()) is not None and id(module) in inside
            ]
            params = {id(own_parameters(module).get(own)) for module, own, _ in there}
            names = tuple(full for _, _, full in there)
            if len(params) > 1 and names not in seen:
                seen.add(names)
                session.write(Untied(names=[name + full for full in names], by=by, at_line=line))

    session.around(
        "torch.distributed.fsdp:fully_shard", before=functools.partial(before, by="fully_shard")
    )
    session.around("torch.nn:Module.to_empty", before=functools.partial(before, by="to_empty"))
    session.subscribe("adopt", adopted)
