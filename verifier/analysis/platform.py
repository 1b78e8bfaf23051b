"""What a script cannot do on this machine: CUDA where there is none, and what CUDA on the CPU
lacks.
"""

import ast
import re

from ..evidence import Sources
from ..probe.compat.names import replicates_on_cpu
from ..trace import Run
from ..trace.events import AsksForAccelerators, Raised, RaisedFrame, Start, Wrap
from .reached import Seen
from .root_cause import root_cause
from .steps_to_compare import steps_of
from .syntax import last_name, walk

NOTE = (
    "the script asks for CUDA and this machine has none: its ranks had a CUDA that computes on the"
    " CPU, over gloo. Not shown: CUDA and Triton kernels, NCCL, CUDA's memory, overlap of work"
)
NOT_HERE = "platform: not on CUDA/NCCL"

# Words of an error or its line by which a script that stopped before its first step asked for CUDA
# (zoo/written_for_gpus, device_flag).
_CUDA = re.compile(
    r"cuda|nccl|nvidia|\bgpus?\b|accelerator|\bbackends?\b|device type", re.IGNORECASE
)
# Errors of CUDA on the CPU itself: the script may be right, so the rule is inconclusive and says to
# run on GPUs (scripts written for GPUs on the CPU (field)).
_LACKING = re.compile(
    r"not linked with support for cuda|not compiled with CUDA|without ATen_cuda|no attribute"
    r" '_cuda|'CUDA' backend|"
    r"dummy base class|_for_cpu|Cannot access accelerator device|active"
    r" drivers|libcuda|CUDA_HOME|nvcc|only supported (on|for) CUDA|"
    r"'_OpNamespace' '\w+' object has no attribute|"
    # kernels of the CPU for fewer dtypes (histc of integers), collectives of NCCL alone
    r"\"\w+_cpu\" not implemented for|Backend gloo does not (implement|support)"
)
_SPAWN = (["spawn"], ["mp", "spawn"], ["multiprocessing", "spawn"])
# Packages of kernels without a CPU form: a script that stops in them needs a GPU, it is not wrong.
_KERNELS = (
    *("triton", "flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "apex"),
    *("amp_C", "transformer_engine", "xformers", "deepspeed", "bitsandbytes"),
    *("liger_kernel", "fused_layer_norm_cuda", "causal_conv1d", "mamba_ssm", "deep_gemm", "cupy"),
)


def asks_for_cuda(run: Run) -> bool:
    """Whether a run stopped for want of CUDA, as far as its error says so or, before the first
    step, its line or what it asked torch.
    """
    if run.timed_out or run.foreign or run.probe_failed:
        return False
    made = steps_of(run) if run.role == "survey" else run.steps()
    if run.completed:
        # A script that ends quietly without a step after it asked for GPUs is run again with CUDA
        # on the CPU (scripts that end where they find no GPU).
        return not made and bool(run.all(AsksForAccelerators))
    if beyond_cuda_on_cpu(run) or made:
        return beyond_cuda_on_cpu(run) != ""
    cause = root_cause(run)
    lines = [frame.code for frame in cause.frames] + [cause.location.code if cause.location else ""]
    errors = [
        trace.end.message for trace in run.traces if trace.end is not None
    ]  # each rank may stop at another line
    return any(_CUDA.search(text) for text in (cause.error, cause.text, *lines, *errors))


def shards_only_on_gpus(run: Run, sources: Sources) -> bool:
    """Whether a run that found no GPU passed by each call of `fully_shard`: where the script finds
    none it may do without sharding (ezpz chooses DDP).
    """
    if not run.completed or not run.all(AsksForAccelerators):
        return False
    calls = [
        (file, node)
        for file in sources.project
        for node in walk(sources.tree(file))
        if isinstance(node, ast.Call) and last_name(node.func) == "fully_shard"
    ]
    if run.role != "survey":
        return bool(calls) and not run.all(Wrap)
    lines = Seen.by(run).lines
    return bool(calls) and all(
        lines.get(file, {}).keys().isdisjoint(range(call.lineno, (call.end_lineno or 0) + 1))
        for file, call in calls
    )


def beyond_cuda_on_cpu(run: Run) -> str:
    """The part of CUDA that the CPU has not, at which a run stopped, and what to do; "" if it
    stopped for another reason.
    """
    if run.completed or run.timed_out:
        return ""
    cause = root_cause(run)
    named = _missing_package(cause.error)
    files = [frame.file for frame in _frames(run, cause.rank)]
    inside = next((name for file in files for name in _KERNELS if f"/{name}/" in file), "")
    if (kernel := inside or (named if named in _KERNELS else "")) != "":
        return (
            f"the script stopped at kernels of `{kernel}`, which need a GPU: choose PyTorch's"
            " implementation instead, or run on GPUs"
        )
    if _LACKING.search(cause.error):
        return (
            f"the script stopped at what CUDA on the CPU does not have: {cause.text}. Run it on"
            " GPUs"
        )
    return ""


def another_number_of_ranks(run: Run) -> str:
    """That the script starts more or fewer ranks than were asked for, and what to do; "" if not
    (probe/substitutes/own_ranks.py).
    """
    error = "" if run.completed or run.timed_out else root_cause(run).error
    name, _, message = error.partition(": ")
    return message if name == "AnotherNumberOfRanks" else ""


def spawns(sources: Sources) -> bool:
    """Whether the project starts processes with `torch.multiprocessing.spawn`, not with that of a
    random generator.
    """
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-2:] in _SPAWN
        for file in sources.project
        for node in walk(sources.tree(file))
    )


def not_installed(run: Run) -> str:
    """The package at whose import a run stopped since this Python has none of its name; "" if it
    stopped for another reason.
    """
    error = "" if run.completed or run.timed_out else root_cause(run).error
    named = _missing_package(error)
    # `No module named 'a.b'`: the package is there and lacks a module, which the script got wrong.
    if not named or f"'{named}'" not in error:  # a module that a package lacks: the script's matter
        return ""
    return (
        f"the script imports `{named}`, which this Python does not find: install it there, or put"
        " its folder on PYTHONPATH"
    )


def _missing_package(error: str) -> str:
    missing = re.search(r"No module named '(\w+)", error)
    return missing.group(1) if missing else ""


def _frames(run: Run, rank: int) -> list[RaisedFrame]:
    """The frames of the error of a rank, innermost first."""
    raised = next(
        (found for t in run.traces if t.rank == rank and (found := t.first(Raised))), None
    )
    return raised.frames if raised is not None else []


def replicas_not_reduced(run: Run) -> str:
    """Why HSDP does not train on the CPU with an old torch, if a run stopped there; "" if not."""
    started = next((record for trace in run.traces for record in trace.of(Start)), None)
    if run.completed or started is None or replicates_on_cpu(started.torch):
        return ""
    inner = next(iter(_frames(run, root_cause(run).rank)), None)
    if (
        inner is None
        # FSDP2 before torch 2.8 does not reduce over replicas on the CPU: HSDP stops in
        # post_backward by torch, not by the script (torch before 2.8: HSDP on the CPU).
        or inner.function != "post_backward"
        or not inner.file.endswith("_fsdp_param_group.py")
    ):
        return ""
    return (
        f"FSDP2 of torch {started.torch} does not reduce over replicas on the CPU: use torch 2.8 or"
        " later, or GPUs"
    )
