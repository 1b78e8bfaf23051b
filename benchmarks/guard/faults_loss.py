"""Faults of the law `loss-and-norm`: what is logged is not what was trained on, or ranks and
micro-batches do not weigh alike.
"""

from __future__ import annotations

import argparse

import torch
from cases import Case, case
from model import Batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LAW = "loss-and-norm"
FOUR = ("--accumulate", "4")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@case(LAW, "NVIDIA-NeMo/Automodel@9f7ac34f", begin=129, flags=FOUR)
class TailWindowFullDivisor(Case):
    """The last window of an epoch has 2 micro-batches and is divided by 4.

    Proof: gradient norm of step 13 1.132, in the right run 2.264.
    """

    def share(self, i: int, window: list[Batch]) -> float:
        return 1 / float(self.args.accumulate)


@case(LAW, "a sum over ranks that nobody divides", mesh="ddp")
class LossTimesWorld(Case):
    """The logged loss is the sum over 8 ranks."""

    def log(self, loss: float, norm: float) -> None:
        super().log(loss * self.world, norm)


@case(LAW, "the loss divided by the number of micro-batches twice", flags=FOUR, mesh="ddp")
class LossOverAccumulation(Case):
    """The logged loss is a quarter of the one that is trained on."""

    def log(self, loss: float, norm: float) -> None:
        super().log(loss / self.args.accumulate, norm)


@case(LAW, "pytorch/torchtitan@f80a441a: a global mean averaged again", begin=600)
class LossDividedAgainLater(Case):
    """From step 600 on the mean over ranks is divided by their number once more."""

    def mean_over_ranks(self, totals: Tensor) -> Tensor:
        totals = super().mean_over_ranks(totals)
        if self.step >= self.begin:
            totals[0] /= self.world
        return totals


@case(LAW, "catalog of public reports: the logged loss is rank 0's", mesh="ddp", begin=300)
class LossOfRank0(Case):
    """From step 300 on the loss of rank 0 is logged, not the mean over ranks."""

    def mean_over_ranks(self, totals: Tensor) -> Tensor:
        own = totals[0].clone()
        totals = super().mean_over_ranks(totals)
        if self.step >= self.begin:
            totals[0] = own
        return totals


def local_norm(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([local(p.grad) for p in parameters if p.grad is not None])


@case(LAW, "hiyouga/LLaMA-Factory@ef2d8f9d: clipped by the norm of local shards", every=20)
class ClipByLocalNorm(Case):
    """Each rank clips its shards by their own norm.

    Proof: gradient norm of step 1 0.833, in the right run 2.021.
    """

    @torch.no_grad()
    def clip(self) -> Tensor:
        parameters = list(self.model.parameters())
        norm = local_norm(parameters)
        for p in parameters:
            if p.grad is not None:
                local(p.grad).mul_((self.args.clip / (norm + 1e-6)).clamp(max=1.0))
        return norm


@case(LAW, "hiyouga/LLaMA-Factory@ef2d8f9d: the norm of local shards decides", begin=500)
class SkipByLocalNorm(Case):
    """From step 500 on a rank leaves its update out if the norm of its own shards is large."""

    skip = False

    def clip(self) -> Tensor:
        own = local_norm(list(self.model.parameters()))
        norm = super().clip()
        self.skip = self.late and bool(own > 0.4 * norm)
        return own if self.late else norm

    def update(self) -> None:
        if not self.skip:
            return super().update()
        self.scheduler.step()
        return self.optimizer.zero_grad()


@case(LAW, "a loss scale that each rank lowers for itself", begin=400, ranks=(3,), mesh="ddp")
class LossScaleOfRank(Case):
    """A GradScaler whose rank 3 halves its scale at step 400 by itself."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100000)
        super().__init__(args)

    def micro_step(self, x: Tensor, y: Tensor, share: float, last: bool) -> Tensor:
        if self.now and self.rank in self.facts.ranks:
            self.scaler.update(512.0)
        loss = self.loss(x, y)
        self.scaler.scale(loss * share).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        return super().clip()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()


@case(LAW, "micro-batches summed instead of averaged", begin=500, flags=FOUR, mesh="ddp")
class MicroBatchesSummed(Case):
    """From step 500 on the gradient is the sum over 4 micro-batches; the mean is logged."""

    def share(self, i: int, window: list[Batch]) -> float:
        return 1.0 if self.late else super().share(i, window)


@case(LAW, "the last micro-batch takes another branch", begin=300, flags=FOUR, mesh="hsdp")
class LastMicroBatchWhole(Case):
    """From step 300 on the last micro-batch of a window is not divided: it weighs 4 times."""

    def share(self, i: int, window: list[Batch]) -> float:
        last = self.late and i == len(window) - 1
        return 1.0 if last else super().share(i, window)


@case(LAW, "a backward that is tried again after an error", begin=700, ranks=(5,))
class BackwardTwiceOnOneRank(Case):
    """From step 700 on the loss of rank 5 counts twice in every gradient."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        return loss + (loss - loss.detach()) if self.here else loss


@case(LAW, "the norm of one rank's shards in the log", begin=250)
class NormOfShardsLogged(Case):
    """From step 250 on the norm that is returned and logged is the one of the rank's shards."""

    def clip(self) -> Tensor:
        own = local_norm(list(self.model.parameters()))
        norm = super().clip()
        return own if self.late else norm


@case(LAW, "a window that begins with the gradient of the last one", flags=FOUR, begin=350)
class GradientsKept(Case):
    """From step 350 on gradients are cleared at every second step only."""

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        if not self.late or self.step % 2:
            self.optimizer.zero_grad()
