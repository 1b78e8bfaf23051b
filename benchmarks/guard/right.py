"""Right variants that look suspicious, and the right trainer as it is: no breach in any."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from cases import Case, Launch, case
from model import Batch, Classifier, ResumableSampler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

SHORT = (Launch(until=400),)
RESUMED = (Launch(until=270, kill=True), Launch(until=400), Launch(world=4, until=500))


def plain(mesh: str, launches: tuple[Launch, ...], name: str, *flags: str) -> None:
    doc = "The right trainer as it is."
    trainer = type(name, (Case,), {"__doc__": doc})
    case("", "the trainer", kind="right", name=name, mesh=mesh, launches=launches, flags=flags)(
        trainer
    )


plain("fsdp", SHORT, "right_fsdp")
plain("hsdp", RESUMED, "right_hsdp_killed_and_resumed")
plain("ddp", SHORT, "right_ddp")


@case("", "gradual unfreezing", kind="right", launches=SHORT, begin=200)
class UnfrozenLater(Case):
    """The first layer is frozen until step 200 and trained from then on, as planned."""

    def build_model(self) -> Classifier:
        core = super().build_model()
        core.embed.requires_grad_(self.step + 1 >= self.begin)
        return core

    def train_step(self, window: list[Batch]) -> None:
        self.core.embed.requires_grad_(self.late)
        super().train_step(window)


@case("", "two optimizers of different rhythm", kind="right", launches=SHORT, mesh="ddp")
class TwoRhythms(Case):
    """The head has an optimizer of its own that steps at every fourth step."""

    slow: torch.optim.Optimizer

    def build_optimizer(self) -> torch.optim.Optimizer:
        head = list(self.core.head.parameters())
        self.slow = torch.optim.SGD(head, lr=self.args.lr, momentum=0.9)
        rest = [p for name, p in self.core.named_parameters() if not name.startswith("head")]
        return torch.optim.AdamW(rest, lr=self.args.lr, weight_decay=0.1)

    def clip(self) -> Tensor:
        rest = [p for name, p in self.core.named_parameters() if not name.startswith("head")]
        return nn.utils.clip_grad_norm_(rest, self.args.clip)

    def update(self) -> None:
        super().update()
        if self.step % 4 == 3:
            for p in self.core.head.parameters():
                if p.grad is not None:
                    p.grad /= 4
            self.slow.step()
            self.slow.zero_grad()

    def after_step(self) -> None:
        """This variant saves nothing."""


@case("", "a warm-up that begins at 0", kind="right", launches=SHORT, every=20)
class RateOfZero(Case):
    """The rate of the first step is 0, so nothing moves in it."""

    def lr_factor(self, step: int) -> float:
        return super().lr_factor(step) * float(min(1.0, step / self.args.warmup))


@case("", "open-mmlab/mmengine@6ebb6f83, the right side", kind="right", launches=SHORT)
class StatisticsApart(Case):
    """BatchNorm statistics are local by design and averaged over ranks before each save."""

    def build_model(self) -> Classifier:
        core = super().build_model()
        normalized = nn.Sequential(core.embed, nn.BatchNorm1d(core.embed.out_features))
        core.embed = normalized  # type: ignore[assignment]
        return core

    def after_step(self) -> None:
        if self.step % 100 == 0:
            for buffer in self.core.embed.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= self.world
        super().after_step()


class Replaced(ResumableSampler):
    """Draws with replacement, the same draws on every rank, of which each takes its own."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.randint(self.total_size, (self.total_size,), generator=generator)
        mine = drawn[self.rank :: self.num_replicas].tolist()
        return iter(mine[self.start :])


@case("", "sampling with replacement", kind="right", launches=SHORT, mesh="ddp")
class WithReplacement(Case):
    """Samples are drawn with replacement, so some come twice within an epoch, on purpose."""

    def build_sampler(self) -> ResumableSampler:
        return Replaced(self.data, self.world, self.rank, seed=self.args.seed)


@case("", "EMA weights for an evaluation", kind="right", launches=SHORT)
class EmaSwappedForEvaluation(Case):
    """Each 40 steps averaged weights are put in, evaluated, and the trained ones put back."""

    averaged: list[Tensor] | None = None

    @torch.no_grad()
    def after_step(self) -> None:
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in self.core.parameters()]
        self.averaged = self.averaged or [p.clone() for p in weights]
        for p, mean in zip(weights, self.averaged, strict=True):
            mean.lerp_(p, 0.02)
        if self.step % 40 == 0:
            kept = [p.clone() for p in weights]
            self.put(weights, self.averaged)
            self.evaluate()
            self.put(weights, kept)
        super().after_step()

    def put(self, weights: list[Tensor], values: list[Tensor]) -> None:
        for p, value in zip(weights, values, strict=True):
            p.copy_(value)

    def evaluate(self) -> None:
        self.model.eval()
        mine = slice(self.rank * 16, self.rank * 16 + 16)
        self.mean_over_ranks(self.loss(self.data.x[mine], self.data.y[mine]).detach())
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the gathered weights are the averaged ones
        self.model.train()


@case("", "a short last window", kind="right", launches=SHORT, flags=("--accumulate", "4"))
class ShortWindowRightlyDivided(Case):
    """The last window of an epoch has 2 micro-batches and is divided by 2."""


@case("", "gradient noise from a shared seed", kind="right", launches=SHORT, mesh="ddp")
class NoiseOfSharedSeed(Case):
    """Each rank adds the same noise to reduced gradients: the seed is the step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.noise = torch.Generator()
        super().__init__(args)

    def clip(self) -> Tensor:
        self.noise.manual_seed(self.step)
        for p in self.core.parameters():
            if p.grad is not None:
                p.grad += 1e-4 * torch.randn(p.shape, generator=self.noise)
        return super().clip()
