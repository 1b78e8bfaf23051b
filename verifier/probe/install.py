"""Puts the probe into this process: topics subscribe, substitutes take their places, then every function is patched once."""

from __future__ import annotations

from .events import (
    backward,
    calls,
    checkpoints,
    criterion,
    data,
    empty,
    exit,
    flight,
    gradients,
    groups,
    memory,
    optimizers,
    precision,
    progress,
    recompute,
    sharding,
    stress,
    templates,
    traffic,
    wrapping,
)
from .events.models import Models
from .session import Session
from .substitutes import ddp, full_precision, gloo_for_nccl, libraries, one_rank, simulation


def install(session: Session) -> None:
    """Record what happens in this process from now on."""
    models = Models(session)
    progress.install(session)  # first: it logs what the script calls before anything else looks at it
    traffic.install(session)
    checkpoints.install(session, flight.install(session))
    templates.install(session)
    sharding.install(session)
    optimizers.install(session, models)
    groups.install(session)
    wrapping.install(session)
    calls.install(session, models)  # after what asks how deep in calls we are
    backward.install(session)
    for topic in (criterion, data, empty, exit, gradients, precision, recompute, stress, memory):
        topic.install(session)
    _substitute(session)
    session.dispatcher.install()


def _substitute(session: Session) -> None:
    mode = session.request["mode"]
    full_precision.install(session)
    libraries.install(session)
    if session.request["backend"] == "gloo":
        gloo_for_nccl.install(session)
    if mode == "ddp":
        ddp.install(session)
    if mode == "alone":
        one_rank.install(session)
    if mode == "simulate":
        simulation.install(session)
