"""Puts the probe into this process: topics subscribe, substitutes take their places, then every function is patched once."""

from __future__ import annotations

import functools

from .dispatcher import name_of
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
    """Record what happens in this process from now on. What of it cannot be installed is reported, and the rest is recorded."""
    models = Models(session)
    saves = flight.Flight(session)
    for subscribe in (
        progress.install,  # first: it logs what the script calls before anything else looks at it
        traffic.install,
        functools.partial(flight.install, flight=saves),
        functools.partial(checkpoints.install, flight=saves),
        templates.install,
        sharding.install,
        functools.partial(optimizers.install, models=models),
        groups.install,
        wrapping.install,
        functools.partial(calls.install, models=models),  # after what asks how deep in calls we are
        *(topic.install for topic in (backward, criterion, data, empty, exit, gradients, precision, recompute)),
        *(topic.install for topic in (stress, memory)),
    ):
        try:
            subscribe(session)
        except Exception as error:
            session.report(name_of(subscribe), error)
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
