"""Faults of the law `every-parameter-trains`: weights that no optimizer moves, that something else
moves, or that move at another rate than the schedule's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cases import Case, case
from model import Batch, Classifier
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

LAW = "every-parameter-trains"
NO_SAVE = ("--save-every", "0")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@case(LAW, "mosaicml/composer#3822: optimizer built before fully_shard", flags=NO_SAVE, every=20)
class OptimizerBeforeSharding(Case):
    """The optimizer holds the parameters that fully_shard replaced, so no weight ever moves.

    Proof: 10 parameters do not move in step 1; 10 parameters in no optimizer.
    """

    def distribute(self, core: Classifier) -> nn.Module:
        self.before = list(core.parameters())
        return super().distribute(core)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.before, lr=self.args.lr, weight_decay=0.1, fused=True)


@case(LAW, "RLinf/RLinf#1359: optimizer rebuilt after warm-up", begin=200)
class ScheduleOfOldOptimizer(Case):
    """The optimizer is built anew at step 200; the schedule goes on with the old one.

    Proof: at step 20 the rate in use is 0.003, the schedule's 0.00274.
    """

    def train_step(self, window: list[Batch]) -> None:
        if self.now:
            self.optimizer = self.build_optimizer()
        super().train_step(window)


@case(LAW, "a name filter that no longer matches", begin=300, flags=NO_SAVE)
class HeadLostFromOptimizer(Case):
    """The optimizer is rebuilt at step 300 with groups by name, and the head is in none.

    Proof: 2 parameters do not move in step 30; 2 parameters in no optimizer.
    """

    def train_step(self, window: list[Batch]) -> None:
        if self.now:
            named = self.model.named_parameters()
            held = [p for name, p in named if not name.startswith("head")]
            self.optimizer = torch.optim.AdamW(held, lr=self.args.lr, weight_decay=0.1)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: self.lr_factor(step + self.begin - 1)
            )
        super().train_step(window)


@case(LAW, "a parameter made after the optimizer", begin=400, flags=NO_SAVE)
class ParameterInNoOptimizer(Case):
    """A learnable temperature is added at step 400; no optimizer holds it.

    Proof: 1 parameters do not move in step 41; 1 parameters in no optimizer.
    """

    temperature: nn.Parameter | None = None

    def train_step(self, window: list[Batch]) -> None:
        if self.now:
            self.temperature = nn.Parameter(torch.ones(()))
            self.core.register_parameter("temperature", self.temperature)
        super().train_step(window)
        if self.temperature is not None:
            self.temperature.grad = None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.temperature is None:
            return super().loss(x, y)
        return F.cross_entropy(self.model(x) * self.temperature, y)

    def clip(self) -> Tensor:
        if self.temperature is None:
            return super().clip()
        sharded = [p for p in self.model.parameters() if p is not self.temperature]
        norm = nn.utils.clip_grad_norm_(sharded, self.args.clip)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


@case(LAW, "a base rate written into param_groups before each step", begin=400)
class RateOverwritten(Case):
    """From step 400 on the rate of the flags is written over the schedule's before each step.

    Proof: at step 40 the rate in use is 0.003, the schedule's 0.00211.
    """

    def clip(self) -> Tensor:
        if self.late:
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.lr
        return super().clip()


@case(LAW, "an infinite input that no check stops", begin=600, flags=NO_SAVE)
class NotFinite(Case):
    """One infinite feature of rank 5 at step 600 makes every weight NaN.

    Proof: embed.weight is not finite after step 60.
    """

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.now and self.rank == 5:
            x = x.clone()
            x[0, 0] = float("inf")
        return super().loss(x, y)


@case(LAW, "weight decay by the training loop, without the learning rate", begin=300, every=20)
class DecayWithoutRate(Case):
    """From step 300 on the weights of the block lose 5 percent in each step besides AdamW.

    Proof: an element moves by 21 times the rate in step 30.
    """

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        if self.late:
            for p in self.core.blocks.parameters():
                p.mul_(0.95)


@case(LAW, "zero_grad moved in front of the step", begin=350)
class ZeroGradBeforeStep(Case):
    """From step 350 on gradients are cleared before the optimizer reads them.

    Proof: 10 parameters do not move in step 35.
    """

    def clip(self) -> Tensor:
        norm = super().clip()
        if self.late:
            self.optimizer.zero_grad()
        return norm


@case(LAW, "FSDP2: set_requires_all_reduce(False) never undone", mesh="hsdp", begin=300)
class AllReduceLeftOff(Case):
    """The all-reduce over replicas stays off from step 300 on: no gradient reaches a weight.

    Proof: 10 parameters do not move in step 30.
    """

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.late and isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(False)
        return super().loss(x, y)


@case(LAW, "features cached without gradient", begin=500, flags=NO_SAVE)
class EmbeddingDetached(Case):
    """From step 500 on the first layer runs below no_grad and gets no gradient any more.

    Proof: 2 parameters do not move in step 50.
    """

    def train_step(self, window: list[Batch]) -> None:
        if self.now:
            self.core.embed.register_forward_hook(lambda module, args, out: out.detach())
        super().train_step(window)


@case(LAW, "catalog of public reports: bfloat16 master weights", flags=("--lr", "2e-5"), every=100)
class BfloatMasterWeights(Case):
    """The weights are bfloat16 and the rate is small: most updates are rounded away.

    Proof: 2 parameters do not move in step 1.
    """

    def build_model(self) -> Classifier:
        return super().build_model().to(torch.bfloat16)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.to(torch.bfloat16), y)

    def observe(self, mean: Tensor) -> None:
        super().observe(mean.to(torch.bfloat16))


@case(LAW, "EMA weights swapped in for an evaluation and never out", begin=500)
class EmaLeftIn(Case):
    """All ranks evaluate with averaged weights at step 500 and go on training from them.

    Proof: an element moves by 35 times the rate in step 50.
    """

    averaged: list[Tensor] | None = None

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        weights = [local(p) for p in self.core.parameters()]
        self.averaged = self.averaged or [p.clone() for p in weights]
        for p, mean in zip(weights, self.averaged, strict=True):
            mean.lerp_(p, 0.02)
            if self.now:
                p.copy_(mean)


@case(LAW, "a loader of pretrained weights that runs again", begin=550, ranks=(2,), every=100)
class ShardSetToZero(Case):
    """Rank 2's shard of one weight is set to zero at step 550, as by an empty buffer.

    Proof: an element moves by 122 times the rate in step 55.
    """

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        if self.now and self.rank in self.facts.ranks:
            local(self.core.blocks[0].get_parameter("up.weight")).zero_()
