"""Twenty single bit flips in state that ranks hold alike, each on one rank at one step.

A flip happens between two steps, or for a gradient between its reduction and the clip. Proof of
all: prove.py --kind flips; the flipped copy and its replica differ in the step of the flip, and
what is left of it later (a low bit of a moment decays) is in the line of the case.
"""

from __future__ import annotations

import torch
from cases import Case, Launch, case
from model import Batch
from torch import Tensor
from torch.distributed.tensor import DTensor

LAW = "replicas-agree"
# state, parameter or buffer, mesh, step, rank, bit (0 to 22 mantissa, 23 to 30 exponent, 31 sign)
FLIPS = (
    ("weight", "embed.weight", "hsdp", 60, 3, 0),
    ("weight", "blocks.0.up.weight", "hsdp", 125, 5, 3),
    ("weight", "blocks.0.down.weight", "hsdp", 230, 6, 12),
    ("weight", "head.weight", "hsdp", 171, 1, 22),
    ("weight", "blocks.0.norm.weight", "hsdp", 90, 7, 26),
    ("weight", "embed.bias", "ddp", 75, 2, 1),
    ("weight", "blocks.0.up.weight", "ddp", 260, 7, 23),
    ("weight", "head.bias", "ddp", 140, 4, 31),
    ("gradient", "blocks.0.up.weight", "hsdp", 110, 2, 24),
    ("gradient", "embed.weight", "ddp", 205, 6, 20),
    ("gradient", "blocks.0.down.weight", "ddp", 66, 1, 10),
    ("gradient", "head.weight", "ddp", 180, 5, 29),
    ("exp_avg", "blocks.0.down.weight", "hsdp", 95, 4, 23),
    ("exp_avg", "embed.weight", "ddp", 155, 3, 2),
    ("exp_avg", "head.weight", "ddp", 220, 7, 28),
    ("exp_avg_sq", "blocks.0.up.weight", "hsdp", 135, 1, 21),
    ("exp_avg_sq", "head.weight", "ddp", 88, 6, 5),
    ("exp_avg_sq", "embed.bias", "ddp", 245, 2, 25),
    ("buffer", "input_mean", "hsdp", 105, 5, 0),
    # DDP sends the buffers of rank 0 before each forward: there a flip heals at once.
    ("buffer", "input_mean", "fsdp", 190, 3, 24),
)


def flip(tensor: Tensor, bit: int) -> None:
    """One bit of the element in the middle of this rank's part."""
    mine = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    words = mine.view(-1).view(torch.int32)
    words[len(words) // 2] ^= -(2**31) if bit == 31 else 1 << bit


class Flip(Case):
    """A bit flips."""

    flipped: tuple[str, str, int]

    def train_step(self, window: list[Batch]) -> None:
        state, name, bit = self.flipped
        if self.now and self.rank in self.facts.ranks and state != "gradient":
            flip(self.place(state, name), bit)
        super().train_step(window)

    def place(self, state: str, name: str) -> Tensor:
        if state == "buffer":
            return self.core.get_buffer(name)
        parameter = self.core.get_parameter(name)
        return parameter if state == "weight" else self.optimizer.state[parameter][state]

    def clip(self) -> Tensor:
        state, name, bit = self.flipped
        if state == "gradient" and self.now and self.rank in self.facts.ranks:
            gradient = self.core.get_parameter(name).grad
            assert gradient is not None
            flip(gradient, bit)
        return super().clip()


def enter_all() -> None:
    for number, (state, name, mesh, step, rank, bit) in enumerate(FLIPS, 1):
        title = f"flip_{number:02}_{state}_bit_{bit}"
        doc = f"Bit {bit} of one element of {name} ({state}) flips on rank {rank} at step {step}."
        trainer = type(title, (Flip,), {"__doc__": doc, "flipped": (state, name, bit)})
        case(
            LAW,
            "a bit flip in memory",
            kind="flips",
            name=title,
            begin=step,
            mesh=mesh,
            ranks=(rank,),
            every=20,
            launches=(Launch(until=300),),
        )(trainer)


enter_all()
