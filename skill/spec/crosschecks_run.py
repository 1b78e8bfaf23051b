"""How the settings of a long run must fit together: which steps are left out, which weights and
which checkpoints are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from .crosschecks import Values, fault, needs


@needs("train.skip_spikes", "train.on_nonfinite", "optimizer.kind")
def spikes_can_be_left_out(
    values: Values, spikes: Any, policy: str, optimizer: str
) -> Iterator[Fault]:
    if spikes is None:
        return
    if policy != "skip":
        yield fault("train.skip_spikes", f"needs train.on_nonfinite: skip, found {policy!r}")
    if optimizer != "adamw":
        message = (
            f"must be null with optimizer.kind {optimizer}: the device decides, and of these"
            " optimizers torch's fused AdamW alone leaves out an update by a number of the device"
        )
        yield fault("train.skip_spikes", message)


@needs("checkpoint.keep_every", "checkpoint.interval")
def kept_steps_are_saved(values: Values, every: int | None, interval: int) -> Iterator[Fault]:
    if every is not None and every % interval:
        message = f"must be a multiple of {values.named('checkpoint.interval')}, found {every}"
        yield fault("checkpoint.keep_every", message)


@needs("checkpoint.keep_best", "checkpoint.interval", "train.validate_interval")
def validated_steps_are_saved(
    values: Values, best: bool, interval: int, validate: int
) -> Iterator[Fault]:
    if best and (validate == 0 or (validate % interval and interval % validate)):
        message = (
            "needs validations of steps that are saved: train.validate_interval must be a multiple"
            f" of {values.named('checkpoint.interval')} or divide it, found {validate}"
        )
        yield fault("checkpoint.keep_best", message)
