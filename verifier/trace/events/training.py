"""Events of training: micro-batches, optimizer steps, gradients, precision, data."""

from dataclasses import field

from ..typed import Event, Line, Located, Part, Place


class Criterion(Part):
    """A cross entropy of a micro-batch: how many of its targets counted, and the gradient of the
    loss by it, if it is one number.
    """

    reduction: str
    valid: int
    gradient: float | None
    targets: int = 0


class Micro(Located):
    """A backward has ended (events/backward.py).

    `rows`: hashes of the samples; `random`: of the generators before the forward.

    `tokens`: elements of the largest integer tensors that the model was given; `parts`: of each
    tensor of the samples its elements, their sum, and that of their absolute values.
    """

    step: int
    loss: float | None
    rows: list[int]
    criteria: list[Criterion]
    random: str | None
    tokens: int = 0
    parts: list[list[float]] = field(default_factory=list)


class Batch(Event):
    """A backward of the survey run has begun (events/batches.py).

    `rows`: hashes of the first of its samples, as in `Micro`; `size`: how many samples it has.
    """

    step: int
    rows: list[int]
    size: int


class Accumulation(Located):
    """An optimizer of the survey run is about to step (events/accumulation.py): after how many
    backwards, unless all is as at the step before.

    `scale`: the constant by which each loss was multiplied; `changed`: by what the gradients were
    since the last backward, before a clip.
    """

    batches: int
    scale: float | None
    changed: float | None


class Cleared(Event):
    """Gradients of a step were discarded before it (events/calls.py)."""

    step: int


class Optimizer(Located):
    """An optimizer was constructed (events/optimizers.py)."""

    number: int
    cls: str
    after_forward: bool


class UnreadSettings(Event):
    """Settings of an optimizer's groups that none of its steps has read so far, and the names that
    it reads (unused_group_settings.py).
    """

    optimizer: int
    cls: str
    step: int
    unread: dict[str, str]  # {name: the value's text}
    read: list[str]


class Step(Located):
    """The state before a step (events/optimizers.py); sketches of this rank's shards."""

    step: int
    optimizer: int
    cls: str
    lr: list[float]
    held: list[str]  # names of the parameters that it updates
    strangers: list[list[int]]  # shapes of what it updates and no model holds
    unsynced: list[str]
    grads: dict[str, list[float] | None]  # after the last backward and before any clip
    after_backward: dict[
        str, list[float] | None
    ]  # if there was a clip: before what the script did until then
    grads_at_step: dict[str, list[float] | None]
    state: dict[str, dict[str, list[float] | float]]
    weights: dict[str, list[float]]
    rounded: list[
        str
    ]  # float32 parameters that a 16-bit dtype holds exactly now, and did not after the last step
    # those that one holds exactly before the first step of the run
    halved: list[str] = field(default_factory=list)


class Stepped(Event):
    """The state after a step (events/optimizers.py).

    `moved`: [change.change, change.gradient, elements that changed].
    """

    step: int
    optimizer: int
    weights: dict[str, list[float]]
    moved: dict[str, list[float]]


class Scheduled(Located):
    """A schedule was stepped (events/schedules.py), at the end `idle` times since its optimizer
    made its last step (of `made`), each after a step of others with parameters of that one.

    `before`: the most such times after which it stepped again; `moved`: whether its learning rates,
    `lr`, changed in these; `others_moved`: whether those of the others did, or have a schedule.
    """

    cls: str
    made: int
    idle: int
    before: int
    moved: bool
    lr: list[float]
    others: list[str]
    lr_of_others: list[float]
    others_moved: bool


class Stress(Event):
    """Huge gradients at the step, {name: [before.before, before.after, after.after]}
    (events/stress.py).
    """

    products: dict[str, list[float]]


class Sync(Located):
    """`set_requires_gradient_sync` was called (events/sharding.py)."""


class Divide(Located):
    """`set_gradient_divide_factor` was called (events/sharding.py)."""

    factor: float


class ChangedGradients(Located):
    """Gradients are changed in place between the last backward of the first step and this step
    (events/changed.py).
    """


class Zeroed(Located):
    """`zero_grad` was called and left these unsynced gradients (events/gradients.py)."""

    step: int
    unsynced: list[str]


class NotCleared(Located):
    """`Module.zero_grad` left these gradients as they were (events/gradients.py)."""

    names: list[str]


class Discarded(Event):
    """`reset_iter_state` discarded unsynced gradients (events/gradients.py)."""


class Clips(Located):
    """The first call of `clip_grad_norm_`, or of a part of it (events/gradients.py)."""


class ClipOfNothing(Located):
    """A clip was given no tensor at a line where it was given some before (events/gradients.py)."""

    step: int


class ShardInStep(Located):
    """An optimizer's own code called `to_local` within its step (events/gradients.py)."""


class Recompute(Located):
    """Whether a recomputed dropout started from a random state of the first forward
    (events/recompute.py).
    """

    same: bool
    place: str


class DroppedInEvaluation(Located):
    """A dropout was active in a forward without gradients of a model in eval mode
    (events/evaluation_dropout.py).
    """

    step: int


class RandomStream(Located):
    """The state of the default generator after a step; `at_line`: where it was set since the last
    one (events/random_stream.py).
    """

    step: int
    state: int
    evaluating: bool = False  # whether gradients were off where it was set


class Drawn(Located):
    """A line of the script has drawn a random tensor outside every forward (events/draws.py);
    `digest`: a hash of its elements.
    """

    step: int
    function: str
    shape: list[int]
    digest: int


class Layer(Event):
    """A module was called for the first time in step 1 (events/layers.py), in the order in which
    these calls end.

    `given`, `made`: sketches of its first input and output, of this rank; `forward`: that of its
    class, if that is the project's.
    """

    name: str
    cls: str
    given: list[float] | None = None
    made: list[float] | None = None
    forward: Line | None = None


class Inexact(Event):
    """ "dropout", "noise" or "autocast" is active, which a full-precision run takes away
    (events/precision.py, events/randomness.py).
    """

    what: str


class LossyCast(Located):
    """FSDP's cast of a forward's input changes whole numbers (events/precision.py)."""

    cls: str
    shape: list[int]
    dtype: str
    changed: int
    was: float
    now: float


class Scaler(Event):
    """A loss scaler is used (events/precision.py)."""

    cls: str


class Autocast(Event):
    """Autocast is used, with this dtype (events/precision.py)."""

    dtype: str


class Sampler(Located):
    """A DistributedSampler begins an order (events/data.py), of which it takes one of `parts`
    parts, with so many samples.
    """

    dataset: int
    epoch: int
    shuffle: bool
    seed: int
    samples: int
    parts: int


class Order(Located):
    """The script has drawn an order of so many samples, other than the one before at this line;
    in the survey run each one that is drawn with gradients (events/data.py).

    `parts`: in so many parts, one a rank, a batch sampler divides it (accelerate's
    BatchSamplerShard).
    """

    samples: int
    digest: int
    parts: int = 1


class Evaluated(Located):
    """Samples that a trained model is given without gradients, for the first time from these lines
    (events/calls.py).
    """

    rows: list[int]
    lines: list[tuple[str, int]]  # of the stack, innermost first


class Compiled(Located):
    """A call of `torch.compile` by the training; `module`: of a module, or a method of one
    (events/compiled.py).
    """

    module: bool


UNKNOWN = "unknown"


class Measured(Located):
    """A call of the script's in which a model ran without gradients alone has returned: the numbers
    it made (events/measured.py).

    `values`: {path: number}, `returned['loss']` or the variable of a function that returns none.
    `drew`: a digest of the random numbers that were drawn, UNKNOWN where they were not seen, ""
    without any.
    """

    step: int  # that is being prepared, from 1
    function: str
    values: dict[str, float]
    drew: str
    caller: Place | None = None


class LoaderStarted(Located):
    """A DataLoader is about to be iterated (events/data.py).

    `samples`: of its data set, 0 where that has no length.
    """

    samples: int
    step: int
    made: Place | None = None  # the user's line that built it


class Fed(Located):
    """A forward before the end of the first step; `at_line`: where its batch came into the script
    (events/batch_origin.py).
    """


class SetEpoch(Event):
    """`DistributedSampler.set_epoch` was called (events/data.py)."""


class Memory(Event):
    """Bytes on this rank after a step (events/memory.py); `before` and `peak` are of the
    process.
    """

    parameters: int
    gradients: int
    optimizer: int
    before: int | None
    peak: int | None
    cuda: int | None


class LossTerm(Part):
    """A single number with a gradient that a function made on the way to a loss.

    `name`: the variable that holds it, or the key of a dict that was returned; "" for what was
    returned otherwise; `time`: the how many-th of that name and function, from 1; `line`: where the
    function returned, or called what began the backward; `weight`: the gradient of the loss by it,
    None if the loss does not depend on it.
    """

    name: str
    time: int
    value: float
    weight: float | None
    line: Line


class LossTerms(Event):
    """What the loss of the first micro-batch is made of, in the order in which functions held it
    (events/loss_terms.py).
    """

    terms: list[LossTerm]
