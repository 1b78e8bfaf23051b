"""CUDA on the CPU: a script that is written for GPUs runs, as it is, on a machine that has none.

Tensors are CPU tensors throughout. A mark on a tensor's storage (marks.py) says on which device the
script has placed it, and `Tensor.device` answers with it. A dispatch mode (placement.py) below all
of torch hands the mark on from inputs to results, lets factories that are asked for CUDA allocate
on the CPU, draws random numbers from CUDA's generator, and refuses operations that a GPU refuses
because their inputs lie on two devices. The other modules answer `torch.cuda`, `torch.accelerator`
and what belongs to them.

What it cannot show: kernels of CUDA or Triton, NCCL, CUDA's allocator, and what overlaps with what.
"""

from ...session import Session
from . import (
    autocast,
    devices,
    distributed,
    factories,
    memory,
    pinned,
    placement,
    profiling,
    randomness,
    saved,
    streams,
    tensor_types,
    tensors,
)


def install(session: Session) -> None:
    """From now on this process has one CUDA device for each rank of its node."""
    for part in (
        devices,
        streams,
        memory,
        pinned,
        randomness,
        tensors,
        tensor_types,
        factories,
        autocast,
        profiling,
        saved,
        distributed,
    ):
        part.install(session)
    placement.install(session)
