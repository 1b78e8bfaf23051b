"""Hollow tensors: a script runs at its real size, as rank 0 of many on CUDA, in one process without
that memory.

It builds on CUDA on the CPU (marks of devices) and on the fake process group (simulation.py).
Beside these, every operator is executed on shapes where its values are unknown (operators.py),
collectives return at once (collectives.py), and nothing is saved (files.py).

Not torch's FakeTensorMode: autograd of a build without CUDA aborts the process on a fake CUDA
tensor ("not linked with support for cuda devices", torch 2.13.0), and as fake CPU tensors integers
of the data would have no values, on which control flow and shapes depend.
"""

from ...session import Session
from ...tensor_fingerprint import Values
from .. import simulation
from ..cuda_on_cpu import marks, placement
from . import files, flex, kernels, reads, storages
from .operators import execute
from .storage import is_hollow


def install(session: Session) -> None:
    """From now on no tensor of CUDA, and no large one of the CPU, has memory."""
    install_as_cpu(session)
    kernels.install(session)
    flex.install(session)


def install_as_cpu(session: Session) -> None:
    """The same with the kernels of the CPU: what a run on real tensors is compared with."""
    files.install(session)
    simulation.install(session)
    reads.install(session)
    storages.install(session)
    placement.execute = execute
    marks.watch = storages.Counting()
    Values.without = staticmethod(is_hollow)


def count(session: Session) -> None:
    """The tensors of CUDA have memory, and it is counted: what a capacity run is compared with."""
    storages.install(session)
    marks.watch = storages.Counting()
