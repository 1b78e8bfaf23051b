"""The request to the launcher process: one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ONE_PROCESS = (
    "simulate",
    "capacity",
    "capacity_as_cpu",
)  # modes in which one process acts as rank 0
# What a rank does with the fields of a Request, and its number; the answer is its exit code.
Live = Callable[[dict[str, Any], int], int]


@dataclass(frozen=True)
class Request:
    """One run: where and what, and what the probe in its ranks does.

    Paths are absolute; times are in seconds.
    """

    folder: str  # receives rank*.jsonl (traces), .out, .err and .stacks
    script: str
    cwd: str
    world_size: int
    argv: list[str] = field(default_factory=list)
    module: str = ""  # run `script` as `python -m module` would
    project: str = ""  # the user's own code lies below this folder; "" for that of the script
    launcher: str = "fork"  # "torchrun": start the ranks with the real one
    devices: list[int] = field(default_factory=list)  # the GPUs that it may use; none given: all
    backend: str = ""  # how GPUs are shared: "" not at all, "nccl" or "gloo"
    cuda_on_cpu: bool = False  # ranks have a CUDA that computes on the CPU
    node_devices: int = 0  # at least so many devices does it show, also to fewer ranks
    averages: bool = False  # gloo averages, also on a torch where it sums
    timeout: float = 60.0
    grace: float = 5.0  # for the other ranks after the first has failed
    # "ddp": DDP replaces fully_shard; "alone": each rank shards over itself; "simulate": a fake
    # process group
    # "capacity": the same on tensors without memory; "capacity_as_cpu": with attention, norms and
    # dropout of the CPU
    # "count": what a capacity run records, of a run on real tensors
    # "survey": the whole script, of which only lines, steps and saves are recorded
    mode: str = "fsdp"
    # packages that record a run, such as W&B, in the place of which the script gets stand-ins
    stand_ins: list[str] = field(default_factory=list)
    structure: bool = False  # of a capacity run: record what rules about the structure read, too
    steps: int = 1
    per_node: int = 0  # ranks of a node that torchrun would report; 0: all
    # no call, backward or step is recorded before the first `fully_shard`: the script trains other
    # models first, or prepares this one
    from_sharding_on: bool = False
    # optimizer steps that are made before any is recorded; weights, buffers and optimizer states
    # are left or loaded behind them
    skip_steps: int = 0
    # "backwards", "forwards": an update without an optimizer is over at the first of them on other
    # samples; else each is a step
    own_steps: str = ""
    fill: bool = False  # NaN in the memory that `to_empty` allocates
    stress: bool = False  # huge gradients in the step after the last
    layers: bool = False  # record what each module makes in step 1
    # record the lines that change gradients between the first backward and the step
    scales: bool = False
    full_precision: bool = False  # no mixed precision, autocast or dropout
    dropless: bool = False  # no dropout, all else as it is
    round_to: str = ""  # load the weights rounded to this dtype
    starting_point: str = ""  # folder of the initial weights, to leave or to load; "" for neither
    leave_starting_point: bool = False
    nudge: bool = False  # load the weights one unit in the last place away
    by_hand: bool = False  # average gradients without DDP's reducer
    # expressions in the frames of the training loop, `file:` and patterns
    watch: list[str] = field(default_factory=list)
    # {prefix of the names of a model: its parameters and their shapes} of the train run: a resumed
    # one may build the last of them only
    models: dict[str, str] = field(default_factory=dict)
    # of these, those that no optimizer holds any more where it resumes
    retired: list[str] = field(default_factory=list)
    # an optimizer follows another that steps at the same lines, also one that has made a single
    # step
    in_phases: bool = False
    # {file: lines}: record which of them the ranks reach
    lines: dict[str, list[int]] = field(default_factory=dict)
    checkpoint: str = ""  # the folder that `{checkpoint}` stands for
    # of a `isolation.world.World`: where its writes land; empty: in place
    world: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)  # run this instead of ranks
    # {"paths", "kind"}: done to checkpoints before the ranks start
    damage: dict[str, Any] = field(default_factory=dict)
    ending: bool = False  # the whole script, of which only the end is recorded
    # optimizer steps behind which the default generators get another seed; 0: never
    reseed_after: int = 0
    watch_saves: bool = False  # record what is given to every save
    # {"rank", "call", "moment"}: where a rank is killed in a save
    crash: dict[str, Any] = field(default_factory=dict)
    secret: str = ""  # marks the lines of the traces
    # checkpoints to open instead of running the script
    open: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, sent: dict[str, Any]) -> Request:
        """The request in what a rank was sent, to which launchers add fields of their own."""
        return cls(**{one.name: sent[one.name] for one in fields(cls)})

    def as_dict(self) -> dict[str, Any]:
        """The request as JSON data."""
        return asdict(self)
