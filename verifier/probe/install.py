"""Puts the probe into this process: topics subscribe, substitutes take their places, then every function is patched once."""

from __future__ import annotations

from .dispatcher import name_of
from .events import topics
from .session import Session
from .substitutes import ddp, full_precision, gloo_for_nccl, libraries, one_rank, randomness, simulation


def install(session: Session) -> None:
    """Record what happens in this process from now on. What of it cannot be installed is reported, and the rest is recorded."""
    for subscribe in topics():
        try:
            subscribe(session)
        except Exception as error:
            session.report(name_of(subscribe), error)
    _substitute(session)
    session.dispatcher.install()


def _substitute(session: Session) -> None:
    mode = session.request["mode"]
    full_precision.install(session)
    randomness.install(session)
    libraries.install(session)
    if session.request["backend"] == "gloo":
        gloo_for_nccl.install(session)
    if mode == "ddp":
        ddp.install(session)
    if mode == "alone":
        one_rank.install(session)
    if mode == "simulate":
        simulation.install(session)
