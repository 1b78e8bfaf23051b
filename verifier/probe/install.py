"""Installs the probe in this process: topics subscribe, substitutes replace functions, then each
function is patched once.
"""

import os

from .capacity.recorder import Recorder
from .dispatcher import name_of
from .events import PLANNING, topics
from .session import Session
from .substitutes import (
    averages,
    cuda_on_cpu,
    ddp,
    fake_tensors,
    full_precision,
    gloo_for_nccl,
    libraries,
    one_rank,
    own_ranks,
    randomness,
    simulation,
    trackers,
)
from .substitutes.cuda_on_cpu import streams
from .substitutes.cuda_on_cpu.marks import VARIABLE

_SUBSTITUTES = {
    "ddp": ddp.install,
    "alone": one_rank.install,
    "simulate": simulation.install,
    "capacity": fake_tensors.install,
    "capacity_as_cpu": fake_tensors.install_as_cpu,
    "count": fake_tensors.count,
}


def install(session: Session) -> None:
    """Record what happens in this process from now on.

    A topic that cannot be installed is reported; the others record.
    """
    if session.request.mode in PLANNING:
        Recorder.now = Recorder(session.frames, streams.number)
    for subscribe in topics(
        session.request.mode, session.request.ending, session.request.structure
    ):
        try:
            subscribe(session)
        except Exception as error:
            session.report(name_of(subscribe), error)
    full_precision.install(session)
    randomness.install(session)
    libraries.install(session)
    trackers.install(session)
    own_ranks.install(session)
    if session.request.averages or session.request.cuda_on_cpu:
        averages.install(session)
    if session.request.cuda_on_cpu:
        os.environ.pop(VARIABLE, None)  # it names GPUs of the machine, of which none is here
        cuda_on_cpu.install(session)
    if session.request.backend == "gloo":
        gloo_for_nccl.install(session)
    if (substitute := _SUBSTITUTES.get(session.request.mode)) is not None:
        substitute(session)
    session.dispatcher.install()
