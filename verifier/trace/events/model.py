"""Events of models: what is sharded how, what a model is at its first forward."""

from collections.abc import Iterable

from ..typed import Event, Located, Part, Place
from .distributed import Mesh


def signature(parameters: Iterable[tuple[str, list[int]]]) -> str:
    """What distinguishes a model from others: the names and shapes of its parameters, as text."""
    return str(sorted(parameters))


class Parameter(Part):
    """A parameter at the first forward of its model, as one rank holds it; `unset`: elements that
    nothing has written since `to_empty`.
    """

    name: str
    shape: list[int]
    dtype: str
    trainable: bool
    managed: bool  # by FSDP
    group: str | None  # the module of its FSDP group
    local_numel: int
    numel: int
    sketch: list[float]  # before the common starting point is loaded
    unset: int
    sharded: bool  # a DTensor
    placements: list[str]
    mesh: list[int]
    mesh_names: list[str]
    ranks: list[int]  # of its mesh
    copy: int  # which of its replicas this rank holds
    rank: int = 0  # filled in by `Run.parameters`
    written: bool = False  # after it was sharded, before the first forward


class Buffer(Part):
    """A buffer at the first forward of its model."""

    name: str
    shape: list[int]
    unset: int


class Group(Part):
    """An FSDP parameter group, by its module; the dtypes of its policy."""

    module: str
    param_dtype: str | None = None
    reduce_dtype: str | None = None


class Block(Part):
    """Sibling modules of one class that each hold further modules: what a wrapping plan would
    name.
    """

    parent: str
    cls: str
    count: int
    numel: int


class Model(Located):
    """A root at its first forward (events/models.py).

    `root`: the prefix of its names, "" for the first.
    """

    root: str
    parameters: list[Parameter]
    buffers: list[Buffer]
    groups: list[Group]
    blocks: list[Block]
    starting_point: str  # "own", "left", "loaded" or why it could not be loaded


class ShardedParameter(Part):
    """A plain parameter that is about to be sharded."""

    name: str
    cls: str  # of its module
    dtype: str
    sketch: list[float]


class Shard(Located):
    """`fully_shard` is about to be applied (events/sharding.py)."""

    modules: list[str]
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    unread: list[str]  # options that have no effect, each with the reason
    parameters: list[ShardedParameter]
    ignored: int = 0  # parameters that it is given as `ignored_params`


class Wrap(Located):
    """The mesh of a `fully_shard` (events/wrapping.py)."""

    mesh: Mesh | None
    explicit_dims: bool


class Tie(Part):
    """One parameter under several names before sharding; `parameters`: how many objects it is
    now.
    """

    names: list[str]
    parameters: int
    line: Place | None


class Ties(Located):
    """The ties of a root at its first forward (events/wrapping.py)."""

    ties: list[Tie]


class Untied(Located):
    """Parameters of a root that are several at its first forward and were one before `by` was
    called `at_line` (events/ties.py).
    """

    names: list[str]
    by: str


class Overwritten(Located):
    """Parameters that a state dict filled `at_line`, and that held other values when a forward
    first read them (events/overwritten.py).
    """

    names: list[str]
    of: int  # parameters that the state dict filled, without constant ones


class Late(Located):
    """Parameters added to a module after it was sharded (events/wrapping.py)."""

    names: list[str]


class Shards(Event):
    """A digest of each shard of a root, None where equality says nothing (events/wrapping.py)."""

    digests: dict[str, str | None]


class ToEmpty(Located):
    """`Module.to_empty` has allocated memory (events/uninitialised_memory.py)."""


class Unset(Located):
    """A parameter or buffer that nothing has written since `to_empty`, at the line of its class
    that names it (events/uninitialised_memory.py).
    """

    name: str


class Local(Located):
    """The script called `to_local` on a plain tensor of the DDP run (substitutes/ddp.py)."""
