"""Events of checkpoints: saves, loads, state dicts and inspected files."""

from dataclasses import field

from ..typed import Event, Located, Part, Place


class Checkpoint(Located):
    """The script called a checkpoint function: `save`, `torch.load`, `set_state_dict` ...

    (events/checkpoints.py).
    """

    op: str
    after_step: int
    to: str


class SavedEntry(Part):
    """One value of a state dict on one rank.

    `kind`: "tensor", "dtensor", "value" (its text) or "object" (its type).
    """

    kind: str
    value: str | None = None
    shape: list[int] = field(default_factory=list)
    dtype: str | None = None
    sketch: list[float] | None = None
    copy: int = 0
    sharded: bool = False
    own: list[int] = field(default_factory=list)  # shape of the local part of a DTensor
    offset: list[int] = field(default_factory=list)


class Saving(Located):
    """What a save is given, and the state of the rank at that time (events/checkpoints.py)."""

    op: str
    call: int
    after_step: int
    to: str
    main: bool  # in the main thread
    alone: bool  # without the other ranks
    entries: dict[str, SavedEntry]
    random: list[float] | None
    weights: dict[str, list[float]]
    state: dict[str, dict[str, list[float] | float]]


class SaveInFlight(Located):
    """A collective of the main thread while an asynchronous save is in flight
    (events/collective_log.py).
    """

    what: str
    saved_line: Place | None
    apart: bool  # whether the group has a backend for each


class Renamed(Located):
    """A saved path was renamed (renamed_paths.py)."""

    old: str
    new: str


class Removed(Located):
    """A saved path is about to be removed (renamed_paths.py)."""

    path: str


class Killed(Event):
    """This rank is about to be killed in a save, at the `moment` that the request asks for
    (crash.py).
    """

    moment: str = ""


class Merged(Located):
    """A written weight holds `factor` times what the adapters of its module add to the base weight
    (events/lora_merges.py).
    """

    name: str
    factor: float


class WrittenFile(Located):
    """A mapping is about to be written to a file (events/written_files.py), with so many values,
    nested ones included, of which so many are tensors.
    """

    to: str
    after_step: int
    values: int
    tensors: int


class SetState(Located):
    """What a rank passes to `set_model_state_dict` or `set_state_dict` (events/checkpoints.py)."""

    op: str
    given: int  # keys
    broadcast: bool


class Template(Located):
    """What `get_state_dict` and the like returned (events/state_dict_templates.py); `states`:
    parameters with optimizer state.
    """

    op: str
    step: int
    full: bool
    offload: bool
    optimizers: int
    states: int | None
    bytes: int
    had_state: bool  # or has stepped, and keeps none
    had_grads: bool


class Lenient(Located):
    """A load that accepts missing keys, and the missing ones (events/state_dict_templates.py)."""

    how: str
    wanted: int
    names: list[str]
    missing_count: int
    missing: list[str]
    unused_count: int
    unused: list[str]


class InspectedCheckpoint(Event):
    """The content of a checkpoint on disk (checkpoint_reader.py)."""

    path: str
    format: str = "missing"
    error: str | None = None
    entries: dict[str, SavedEntry] = field(default_factory=dict)
    missing_files: list[str] = field(default_factory=list)
