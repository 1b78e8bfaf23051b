"""Alternating training: users, items, users, items, ... and at the end everything together."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    name: str
    length: int


PLAN = [Phase("user", 9), Phase("item", 9), Phase("user", 9), Phase("item", 9), Phase("both", 12)]
TOTAL = sum(p.length for p in PLAN)


def phase_at(step):
    for p in PLAN:
        if step < p.length:
            return p.name
        step -= p.length
    raise IndexError(step)


class Switch:
    """Thaws the tower of the phase, freezes the other one. Each tower has its own optimizer, whose moments rest
    while the tower does; the global bias trains in the last phase only."""

    def __init__(self, model, optimizers):
        self.model, self.optimizers, self.current = model, optimizers, None

    def to(self, name):
        if name == self.current:
            return
        self.current = name
        for side in ("user", "item"):
            getattr(self.model, side).requires_grad_(name in (side, "both"))
        self.model.bias.requires_grad_(name == "both")

    def active(self):
        names = ("user", "item", "bias") if self.current == "both" else (self.current,)
        return [self.optimizers[n] for n in names]
