"""Events of groups and collectives."""

from dataclasses import field

from ..typed import Event, Located, Part, Place


class Mesh(Part):
    """A device mesh."""

    shape: list[int]
    names: list[str]
    ranks: list[int]


class NamedMesh(Event):
    """A device mesh of several dims was made, with names for them (events/wrapping.py)."""

    mesh: Mesh


class Reduce(Located):
    """A group is about to reduce, and these parameters have no gradient (events/groups.py)."""

    group: str
    step: int
    micro: int
    missing: list[str]
    filled: bool  # FSDP puts zeros in their place
    ranks: list[int]


class AllReduce(Located):
    """`set_requires_all_reduce` was called (events/groups.py)."""

    value: bool


class Stale(Located):
    """A root is called with groups that were gathered before their shards changed
    (events/groups.py).

    `stepped`: an optimizer step changed them; otherwise the script did.
    """

    groups: list[str]
    after_step: int
    stepped: bool
    evaluated: Place | None


class Partial(Event):
    """Groups that an optimizer step finds with gradients that were not all-reduced
    (events/groups.py).
    """

    groups: list[str]
    step: int


class InplaceView(Located):
    """A view that a wrapped module returned was changed in place before backward
    (events/groups.py).
    """

    module: str


class ShardedInput(Event):
    """A root is given a DTensor (events/wrapping.py)."""


class FromLocal(Located):
    """The script made a DTensor of local shards (events/wrapping.py)."""

    shape: list[int]
    local: list[int]
    ranks: list[int]


class PartialRead(Located):
    """A number was read from a Partial DTensor (events/gradients.py). `truth`: what `bool` gave."""

    op: str
    placements: list[str]
    truth: bool | None = None


class TrafficLine(Part):
    """A line of the script that gathers."""

    at_line: Place


class Traffic(Event):
    """The collectives of a step, {kind: [number, bytes]}, of its model and of the script itself
    (events/traffic.py).

    `weights`: the bytes that the script gathers of parameters and of DTensors; not those of its own
    plain tensors.
    """

    step: int
    calls: int  # forwards of modules with FSDP groups
    model: dict[str, list[int]]
    script: dict[str, list[int]]
    weights: int
    lines: list[TrafficLine]  # where the script gathers, most bytes first
    expected: dict[str, int]  # {kind: number} by the groups that there are
    # of `model`: {kind: number} up to the end of each backward
    micros: list[dict[str, int]] = field(default_factory=list)


class ProgressEvent(Part):
    """A call that a rank has reached (a line of the progress log); `frames`: file, line and
    function, innermost first.
    """

    op: str
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    value: int | None = None


class CollectiveCall(Part):
    """One of the last collectives that the script called on a rank (events/last_collectives.py).

    `gives`, `takes`: elements for each rank of the group; `values`: whole numbers and shapes of
    tensors among the variables of each frame.
    """

    op: str
    order: int  # of the rank's calls, from 0
    ranks: list[int]  # of its group
    number: int  # of the group's calls, from 1
    gives: list[int]
    takes: list[int]
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    values: list[dict[str, int | list[int]]] = field(default_factory=list)
