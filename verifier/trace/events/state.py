"""Events of state: what a training loop carries from step to step beside its weights, and what
becomes of gradients in between.
"""

from dataclasses import field

from ..typed import Located, Part, Place


class Held(Part):
    """One value that the training loop can reach.

    `holder`: what holds it ("module", "optimizer", "scheduler", "scaler", "object", "dataset",
    "local"), "parameter" for one that is in no model, or "generator" for the state of a random
    generator, of which the value is a hash of 48 bits. A tensor has a sketch of this rank's part
    and its number of elements; a number has a value.
    """

    holder: str
    value: float | None = None
    sketch: list[float] | None = None
    numel: int = 1
    sharded: bool = False
    lost: float | None = (
        # of a 16-bit copy of a parameter: the elements that its last change left as they were, of
        # those apart
        None
    )
    live: bool = False  # a plain tensor that shares its memory with a parameter of a model
    copy: int = 0  # which replica of a DTensor this rank holds
    dtype: str = ""


class State(Located):
    """What has changed since the last one, when the first forward of a step begins
    (events/state.py).

    `values`: {path from a variable of the training loop: value}; `gone`: paths that are no more.
    `evaluations`: forwards without gradients so far. `in_eval`: modules in eval mode, of the models
    that are trained.
    """

    step: int  # that is being prepared, from 1
    values: dict[str, Held]
    gone: list[str]
    evaluations: int
    in_eval: list[str]
    # `lost` of 16-bit parameters of frozen models that have changed
    frozen: dict[str, float] = field(default_factory=dict)
    function: str = ""  # in which the innermost frame of the training loop runs


class BuffersRead(Located):
    """What depends on buffers of the models reads them: a forward without gradients, or, if
    `saved`, a `state_dict` (events/state.py).

    `values`: those that were written since the last one.
    """

    step: int
    values: dict[str, Held]
    saved: bool


class KeptGradients(Located):
    """An optimizer consumes gradients that its step before has consumed, and that `at_line` a
    backward has added to (events/state.py).
    """

    step: int
    names: list[str]


class Leftover(Located):
    """An optimizer uses gradients that were there when another one stepped, `at_line`
    (events/stale_grads.py).
    """

    step: int
    optimizer: int
    names: list[str]


class EditedGradients(Located):
    """Between two backward passes of one step gradients were changed: `factors` by parameter; 0.0:
    cleared, None: no multiple.
    """

    step: int
    micro: int  # the backward that found it, from 1
    factors: dict[str, float | None] = field(default_factory=dict)


class ReplacedRead(Located):
    """The script read a parameter that `fully_shard` or `to_empty` has replaced
    (events/replaced.py); `by`: the function of torch.
    """

    name: str
    by: str
    step: int


class SharedMemory(Located):
    """Frozen parameters of one model that are in the memory of trained ones of another
    (events/shared_memory.py); `names`: of some.
    """

    step: int  # after which it was seen
    names: list[str]


class PutBack(Located):
    """A parameter got other values at `over`, a model ran with them, and it is copied onto itself
    (events/restored_weights.py).
    """

    step: int
    name: str
    over: Place | None


class OntoItself(Located):
    """A parameter is averaged with its own memory before step `step`, by `op`, or put back from it
    (events/restored_weights.py).
    """

    step: int
    name: str
    op: str
