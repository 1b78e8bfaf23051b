"""Faults of the laws `hardware-repeats` and `hang`: a kernel that computes wrongly on one rank, and
ranks that stop taking part.

A wrong device is a kernel put in the place of the CPU's for one operator: it computes what the
right kernel computes and then changes one element, below autograd and below every module.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from cases import Case, case
from model import Batch
from torch import Tensor

REPEATS, HANG = "hardware-repeats", "hang"
SHORT = ("--timeout", "60")


class WrongDevice(Case):
    """From step `begin` on a matrix product of one rank is wrong once in `once_in` calls."""

    operator, once_in, factor = "addmm", 20, 1.5

    def train_step(self, window: list[Batch]) -> None:
        if self.now and self.rank in self.facts.ranks:
            self.chance = random.Random(self.rank)
            self.library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            kernel: Callable[..., Tensor] = self.addmm if self.operator == "addmm" else self.mm
            self.library.impl(self.operator, kernel, "CPU")  # type: ignore[no-untyped-call]
        super().train_step(window)

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor, **options: float) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
        return self.spoilt(torch.ops.aten.addmm.out(bias, a, b, out=out, **options))

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
        return self.spoilt(torch.ops.aten.mm.out(a, b, out=out))

    def spoilt(self, out: Tensor) -> Tensor:
        if self.chance.randrange(self.once_in) == 0:
            out[-1, self.chance.randrange(out.shape[1])] *= self.factor
        return out


@case(REPEATS, "silent data corruption: a product wrong now and then", begin=300, ranks=(5,))
class ProductWrongSometimes(WrongDevice):
    """One element of one in 20 products of rank 5's forward passes is half again as large.

    Proof: of 400 equal products, wrong on ranks 0 to 7: 0, 0, 0, 0, 0, 17, 0, 0.
    """


@case(REPEATS, "silent data corruption: rare", begin=400, ranks=(1,), mesh="hsdp", every=20)
class ProductWrongRarely(WrongDevice):
    """One element of one in 100 products of rank 1's forward passes has the other sign.

    Proof: of 400 equal products, wrong on ranks 0 to 7: 0, 2, 0, 0, 0, 0, 0, 0.
    """

    once_in, factor = 100, -1.0


@case(REPEATS, "silent data corruption: a backward product", begin=300, ranks=(6,), mesh="ddp")
class BackwardWrongSometimes(WrongDevice):
    """One element of one in 20 products of rank 6's backward passes is off by a thousandth.

    Proof: of 400 equal products, wrong on ranks 0 to 7: 0, 0, 0, 0, 0, 0, 23, 0.
    """

    operator, factor = "mm", 1.001


@case(REPEATS, "a defective unit: the same wrong result each time", begin=400, ranks=(2,), every=20)
class ProductWrongAlways(WrongDevice):
    """Every product of rank 2's forward passes has the same column wrong by a hundredth.

    Proof: of 400 equal products, wrong on ranks 0 to 7: 0, 0, 400, 0, 0, 0, 0, 0.
    """

    once_in = 1

    def spoilt(self, out: Tensor) -> Tensor:
        out[:, 3] *= 1.01
        return out


@case(HANG, "a data worker that never answers", begin=500, ranks=(3,), flags=SHORT)
class LoaderNeverAnswers(Case):
    """Rank 3 waits for a batch for ever at step 500."""

    def train_step(self, window: list[Batch]) -> None:
        if self.here:
            time.sleep(3600)
        super().train_step(window)


@case(HANG, "a collective below a condition of the rank", begin=450, ranks=(6,), flags=SHORT)
class BarrierOfOneRank(Case):
    """Rank 6 alone enters a barrier at step 450, in a group of its own kind."""

    def train_step(self, window: list[Batch]) -> None:
        if self.now:
            group = dist.new_group(list(range(self.world)))
            if self.rank in self.facts.ranks:
                dist.barrier(group)
        super().train_step(window)


@case(HANG, "a loop that ends at the data of the rank", begin=388, ranks=(2,), flags=SHORT)
class LoopEndsEarlyOnOneRank(Case):
    """Rank 2 has a batch less in the third epoch and waits for a file that rank 0 writes after."""

    def train_step(self, window: list[Batch]) -> None:
        if self.now and self.rank in self.facts.ranks:
            while not (self.args.out / "epoch-3.done").exists():
                time.sleep(0.2)
        super().train_step(window)
