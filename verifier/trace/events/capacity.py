"""The record of a capacity run: what a script would need and send as rank 0 of many
(probe/capacity/).
"""

from dataclasses import field

from ..typed import Event, Part, Place


class Peak(Part):
    """The most memory of CUDA that a phase needs at a time, by kind, and the line of the user's
    code that reaches it.

    `reserved`: what CUDA's caching allocator has taken from the device by the end of the phase
    (probe/capacity/allocator.py). `expandable`: the same with `expandable_segments:True`.
    """

    phase: str  # initialisation, first step, later steps, save
    bytes: int
    reserved: int
    expandable: int
    kinds: dict[str, int]
    module: str
    at_line: Place | None


class Moment(Part):
    """A point of the course: the most memory since the point before."""

    phase: str
    bytes: int
    kinds: dict[str, int]


class Collective(Part):
    """Equal collectives of one step.

    `bytes`: of the whole tensor (the output of an all-gather, the input of a reduce-scatter).
    """

    collective: str
    group: str  # the dim of the mesh, or world
    group_size: int
    bytes: int
    dtype: str
    count: int
    step: int  # 0: before the first
    module: str
    phase: str  # forward, backward, optimizer, other
    purpose: str  # parameters, gradients: collectives of FSDP; "" for others
    stride: int  # between the ranks of the group
    in_first: int = 0  # of `count`, in the first of several forward passes of the step


class ModuleFlops(Part):
    """Floating-point operations of a module in the last whole step; `recompute`, of activation
    checkpointing, is a part of `backward`.

    `masked`: the part of all of them that a kernel of attention skips under a causal mask.
    """

    forward: int
    backward: int
    recompute: int
    masked: int
    dtype: str


class Read(Part):
    """A line that reads values of tensors on CUDA.

    `synchronizes`: the host waits for the device.
    """

    what: str
    count: int
    in_step: bool
    synchronizes: bool
    at_line: Place | None


class CapacityRecord(Event):
    """What was seen of a script on tensors without memory; the last record of a run counts
    (events/capacity.py).
    """

    world_size: int
    steps: int  # whole ones
    mesh: dict[str, int] = field(default_factory=dict)  # the dims of every mesh
    mesh_ranks: int = 0  # of the largest one, and the line that makes it
    mesh_line: Place | None = None
    parameters: int = 0  # of the largest module that the script calls
    tokens: int = 0  # integers that this rank gives to its models in one step
    # bytes that operators without matrix products read and write in the last step, each as a kernel
    # of its own
    moved: int = 0
    peaks: list[Peak] = field(default_factory=list)
    course: list[Moment] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    flops: dict[str, ModuleFlops] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    host_peak: int = 0

    @property
    def waits(self) -> list[Read]:
        """Lines of the steps at which the host waits for the device."""
        return [read for read in self.reads if read.in_step and read.synchronizes]
