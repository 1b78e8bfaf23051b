"""What a case is (a fault, a bit flip or a right variant), and the table of all of them.

A case is a subclass of `Case` below `@case(...)`; its docstring says in one sentence what is
wrong (what looks suspicious, of a right variant), and after `Proof:` what was measured without the
guard (prove.py). Steps count from 1: `begin` is the first step that is not as it should be, or 0
if that is so before the first step; of a resume fault it is the step of the checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from trainer import Trainer

LAWS = (
    "replicas-agree",
    "every-parameter-trains",
    "samples",
    "loss-and-norm",
    "resume-as-saved",
    "hardware-repeats",
    "hang",
)
MODULES = {
    "faults": (
        "faults_replicas",
        "faults_training",
        "faults_samples",
        "faults_loss",
        "faults_resume",
        "faults_device",
    ),
    "flips": ("flips",),
    "right": ("right",),
}
EVERY_RANK = tuple(range(8))


@dataclass(frozen=True)
class Launch:
    """One start of the script: ranks, the step at which it ends, and whether it is killed there."""

    world: int = 8
    until: int = 1000
    kill: bool = False


ONE_RUN = (Launch(),)


@dataclass(frozen=True)
class Facts:
    """What run.py needs of a case; `every` is the check interval given to the guard."""

    name: str
    kind: str
    law: str
    source: str
    begin: int = 0
    mesh: str = "fsdp"
    ranks: tuple[int, ...] = EVERY_RANK
    every: int = 50
    launches: tuple[Launch, ...] = ONE_RUN
    flags: tuple[str, ...] = ()
    wrong: str = ""
    proof: str = ""


class Case(Trainer):
    """A trainer with one thing changed from step `begin` on, on some ranks."""

    facts: ClassVar[Facts]

    def __init__(self, args: argparse.Namespace) -> None:
        self.begin = args.begin if args.begin >= 0 else self.facts.begin
        super().__init__(args)

    @property
    def late(self) -> bool:
        """Whether the step that runs now is one of the changed ones."""
        return self.step + 1 >= self.begin

    @property
    def now(self) -> bool:
        """Whether this is the first changed step."""
        return self.step + 1 == self.begin

    @property
    def here(self) -> bool:
        """Whether this rank is changed in the step that runs now."""
        return self.late and self.rank in self.facts.ranks


CASES: dict[str, type[Case]] = {}


def case(
    law: str,
    source: str,
    *,
    kind: str = "faults",
    name: str = "",
    begin: int = 0,
    mesh: str = "fsdp",
    ranks: tuple[int, ...] = EVERY_RANK,
    every: int = 50,
    launches: tuple[Launch, ...] = ONE_RUN,
    flags: tuple[str, ...] = (),
) -> Callable[[type[Case]], type[Case]]:
    """Enter a class with its facts into the table; its name there is the class's in snake case."""

    def enter(trainer: type[Case]) -> type[Case]:
        known = name or re.sub(r"(?<!^)(?=[A-Z])", "_", trainer.__name__).lower()
        words = " ".join((trainer.__doc__ or "").split())
        wrong, _, proof = (part.strip() for part in words.partition("Proof:"))
        trainer.facts = Facts(
            known, kind, law, source, begin, mesh, ranks, every, launches, flags, wrong, proof
        )
        if known in CASES or law not in (*LAWS, ""):
            raise ValueError(f"{known}: the name is taken, or {law!r} is no law")
        CASES[known] = trainer
        return trainer

    return enter


def all_cases(kind: str = "") -> list[Facts]:
    """The facts of every case of a kind, in the order of their files."""
    for group in MODULES.values():
        for module in group:
            importlib.import_module(module)
    return [trainer.facts for trainer in CASES.values() if kind in ("", trainer.facts.kind)]


def trainer_of(name: str) -> type[Case]:
    all_cases()
    return CASES[name]
