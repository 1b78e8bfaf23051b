"""Events of the script as a whole: its beginning, its end, its errors, and the errors of the
probe.
"""

from dataclasses import field

from ..typed import Event, Located, Part, Place
from .state import Held


class Start(Event):
    """The probe is installed (rank.py)."""

    torch: str


class End(Event):
    """How the script ended: `how` is "return", "stopped", "sys.exit", "os._exit" or "exception"
    (rank.py, events/exit.py).
    """

    how: str
    code: int = 0
    error: str = ""
    message: str = ""
    frames: list[Place] = field(default_factory=list)


class RaisedFrame(Part):
    """A frame of an error; if its `self` is a module: its class, a number for the object, how many
    weights are shards now.
    """

    file: str
    line: int
    function: str
    own: bool  # of the user's code
    optimizer: str | None = None
    module: str | None = None
    number: int | None = None
    fsdp: bool | None = None
    shards: int = 0
    shards_below: int = 0
    tensors: dict[str, str] = field(default_factory=dict)  # {name of a local: dtype}
    buffers: dict[str, str] = field(default_factory=dict)


class Raised(Event):
    """The frames of the script's error, innermost first (events/raised.py)."""

    frames: list[RaisedFrame]


class Reached(Event):
    """What the script has reached since the last such event, in the survey run (events/survey.py).

    `steps`: optimizer steps made; `lines`: {file: lines of the project}; `sides`: {file: what was
    evaluated of its conditional expressions} (expression_sides.py); `backwards`: since then.
    `stack`: the frames of the first optimizer step, innermost first: lines are reported again from
    then on. `trainable`: parameters that require gradients. `ended`: the script has come to its
    end, with these `weights` (a digest of this rank's part); `still`: parameters and buffers, by
    their names in the modules that are sharded, that have their values of the first step. `apart`:
    optimizers without shards have stepped only before the first one with shards. `between`: the
    parameters that were written since the step before, and had other values as this one began.
    """

    steps: int
    lines: dict[str, list[int]] = field(default_factory=dict)
    sides: dict[str, list[list[int]]] = field(default_factory=dict)
    backwards: int = 0
    trainable: int = 0
    stack: list[Place] = field(default_factory=list)
    sharded: bool = False  # whether `fully_shard` was called before
    ended: bool = False
    weights: str = ""
    still: list[str] = field(default_factory=list)
    apart: bool = False
    between: list[str] = field(default_factory=list)


class LoopAt(Part):
    """A loop around a line that an error passed through: its first and last line.

    `total`: its iterations; `done`: those before the one that ran; `goes_on`: whether the test of a
    `while` holds. None: not known.
    """

    file: str
    line: int
    last: int
    total: int | None = None
    done: int | None = None
    goes_on: bool | None = None


class Passing(Event):
    """An error that passed through a function of the training, or was caught in it, in the survey
    run (probe/passing_errors.py).

    `number`: the same for one error, and what was raised from it, on its way out. `classes`: names
    of its class and of the bases; `origin`: whose code defines the class. `frames`: of the project,
    innermost first; the last is the function that it passed through. `loops`: around these lines,
    of functions of the training (before the first step, of the project), outermost first;
    `callers`: those around the calls that led to the last function. `before_step`: whether the line
    is before that of the step. `steps`: made before it; `backwards`: since the sharding, and
    `since_step`: since the last step. `training`: whether a step had been made; `sharded`: whether
    `fully_shard` had been called. `thread`: whether it left the outermost function of the project
    in a thread that the script has started. `again`: how often one like it, from the same line, was
    met since the last step, with this one.
    """

    number: int
    error: str
    message: str
    classes: list[str]
    origin: str
    frames: list[Place]
    loops: list[LoopAt]
    callers: list[LoopAt]
    before_step: bool
    steps: int
    backwards: int
    since_step: int
    training: bool
    sharded: bool
    thread: bool = False
    again: int = 1


class Visited(Event):
    """{file: those of the lines that the request asked for that this rank has reached}, and what
    was evaluated of the conditional expressions on these lines (rank.py).
    """

    lines: dict[str, list[int]]
    sides: dict[str, list[list[int]]] = field(default_factory=dict)


class Printed(Located):
    """What rank 0 printed or logged behind its last step, `at_line`, called from `stack`
    (events/ending.py).
    """

    text: str
    stack: list[Place]
    steps: int  # that all optimizers had made


class Final(Event):
    """This rank's parts of the weights when the script destroys its process group, in the survey
    and ending runs (events/ending.py).
    """

    weights: dict[str, list[float]]


class Written(Event):
    """The tensors in a file written behind the last step (events/ending.py); `path`: below
    `{checkpoint}` or the current folder.
    """

    path: str
    values: dict[str, Held]
    steps: int  # that all optimizers had made


class AsksForAccelerators(Located):
    """The script asks whether there are accelerators, or how many (events/accelerators.py)."""


class Adapted(Event):
    """What the probe changed in a library so that it shards on the CPU
    (substitutes/libraries.py).
    """

    text: str


class ProbeError(Event):
    """An error of the probe, which the script did not see.

    `symbol`: the subscriber or the name of torch that is missing.
    """

    symbol: str
    text: str
    where: str = ""  # the innermost line of the verifier
