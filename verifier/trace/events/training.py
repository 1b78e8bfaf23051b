"""Events of training: micro-batches, optimizer steps, gradients, precision, data."""

from __future__ import annotations

from ..typed import Event, Part, record
from .base import Located


@record
class Criterion(Part):
    """A cross entropy of a micro-batch: how many targets counted, and its value if it is one number."""

    reduction: str
    valid: int
    value: float | None


@record
class Micro(Located):
    """A backward has ended (events/backward.py). `rows`: hashes of the samples; `random`: of the generators before the forward."""

    step: int
    loss: float | None
    rows: list[int]
    criteria: list[Criterion]
    random: str | None


@record
class Cleared(Event):
    """Gradients of a step were thrown away before it (events/calls.py)."""

    step: int


@record
class Optimizer(Located):
    """An optimizer was constructed (events/optimizers.py)."""

    number: int
    cls: str
    after_forward: bool


@record
class Step(Located):
    """What a step finds before it changes anything (events/optimizers.py); sketches of this rank's shards."""

    step: int
    optimizer: int
    cls: str
    lr: list[float]
    held: list[str]  # names of the parameters that it updates
    strangers: list[list[int]]  # shapes of what it updates and no model holds
    unsynced: list[str]
    grads: dict[str, list[float] | None]  # after the last backward
    grads_at_step: dict[str, list[float] | None]
    state: dict[str, dict[str, list[float] | float]]
    weights: dict[str, list[float]]


@record
class Stepped(Event):
    """What a step left (events/optimizers.py). `moved`: [change.change, change.gradient, elements that changed]."""

    step: int
    optimizer: int
    weights: dict[str, list[float]]
    moved: dict[str, list[float]]


@record
class Stress(Event):
    """What became of huge gradients, {name: [before.before, before.after, after.after]} (events/stress.py)."""

    products: dict[str, list[float]]


@record
class Sync(Located):
    """`set_requires_gradient_sync` was called (events/sharding.py)."""


@record
class Divide(Located):
    """`set_gradient_divide_factor` was called (events/sharding.py)."""

    factor: float


@record
class Zeroed(Located):
    """Gradients were zeroed, and these unsynced ones stayed (events/gradients.py)."""

    step: int
    unsynced: list[str]


@record
class NotCleared(Located):
    """`Module.zero_grad` left these gradients as they were (events/gradients.py)."""

    names: list[str]


@record
class Discarded(Event):
    """`reset_iter_state` threw unsynced gradients away (events/gradients.py)."""


@record
class Clips(Event):
    """The first call of `clip_grad_norm_` (events/gradients.py)."""


@record
class ClipOfNothing(Located):
    """A clip was given no tensor at a line where it was given some before (events/gradients.py)."""

    step: int


@record
class ShardInStep(Located):
    """An optimizer's own code asked for a shard within its step (events/gradients.py)."""


@record
class Recompute(Located):
    """A recomputed dropout met a random state of the first forward, or not (events/recompute.py)."""

    same: bool
    place: str


@record
class Inexact(Event):
    """ "dropout", "noise" or "autocast" is active, which a full-precision run takes away (events/precision.py, events/randomness.py)."""

    what: str


@record
class LossyCast(Located):
    """FSDP's cast of a forward's input changes whole numbers (events/precision.py)."""

    cls: str
    shape: list[int]
    dtype: str
    changed: int
    was: float
    now: float


@record
class Scaler(Event):
    """A loss scaler is used (events/precision.py)."""

    cls: str


@record
class Autocast(Event):
    """Autocast is used, with this dtype (events/precision.py)."""

    dtype: str


@record
class Sampler(Located):
    """A DistributedSampler begins an order (events/data.py)."""

    dataset: int
    epoch: int
    shuffle: bool
    seed: int
    samples: int


@record
class LoaderStarted(Located):
    """A DataLoader over a data set of known length is about to be iterated (events/data.py)."""

    samples: int
    step: int


@record
class SetEpoch(Event):
    """`DistributedSampler.set_epoch` was called (events/data.py)."""


@record
class Memory(Event):
    """Bytes on this rank after a step (events/memory.py); `before` and `peak` are of the process."""

    parameters: int
    gradients: int
    optimizer: int
    before: int | None
    peak: int | None
    cuda: int | None
