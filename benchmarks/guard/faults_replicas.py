"""Faults of the law `replicas-agree`: what ranks should hold alike drifts apart."""

from __future__ import annotations

import torch
from cases import Case, case
from model import WIDTH, Batch, Classifier
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LAW = "replicas-agree"


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@case(LAW, "catalog of public reports: the mesh argument is one replica's", mesh="hsdp", every=20)
class MeshOfOneReplica(Case):
    """fully_shard gets the shard dimension alone: each half of the ranks trains a model."""

    def distribute(self, core: Classifier) -> nn.Module:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=names)
        for block in core.blocks:
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(core, mesh=mesh["dp_shard"])
        return core


@case(LAW, "DDP: no_sync entered around an evaluation and never left", mesh="ddp", begin=700)
class NoSyncLeftOn(Case):
    """Gradient synchronisation of DDP stays off from step 700 on.

    Proof: at step 70 rank 1 holds another embed.weight and 29 tensors more.
    """

    def micro_step(self, x: Tensor, y: Tensor, share: float, last: bool) -> Tensor:
        return super().micro_step(x, y, share, last and not self.late)


@case(LAW, "open-mmlab/mmengine@6ebb6f83: statistics of local data, read by the forward", every=20)
class BufferLocal(Case):
    """The running mean of the inputs is updated from each rank's own batch.

    Proof: at step 10 rank 1 holds another input_mean.
    """

    def train_step(self, window: list[Batch]) -> None:
        super().train_step(window)
        if self.step % 10 == 0:
            self.observe(window[0][0].mean(0))


# DDP sends the buffers of rank 0 before each forward: there it would heal.
@case(LAW, "a swallowed exception on one rank", begin=700, ranks=(5,))
class BufferSkippedOnOneRank(Case):
    """Rank 5 no longer updates the running mean of the inputs.

    Proof: at step 70 rank 5 holds another input_mean.
    """

    def observe(self, mean: Tensor) -> None:
        if self.step < self.begin or self.rank not in self.facts.ranks:
            super().observe(mean)


@case(LAW, "a plateau schedule that reads the loss of its own rank", mesh="ddp", begin=200)
class PlateauOnLocalLoss(Case):
    """Each rank halves its learning rate when its own loss of the step is above its average.

    Proof: at step 22 rank 6 holds another lr.
    """

    scale = average = 1.0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        if self.late and loss.item() > 1.3 * self.average:
            self.scale = max(self.scale / 2, 1 / 64)
        self.average += 0.05 * (loss.item() - self.average)
        return loss

    def lr_factor(self, step: int) -> float:
        return self.scale * super().lr_factor(step)


@case(LAW, "a loss-spike guard that decides on the local loss", mesh="ddp", begin=300, every=100)
class SkipOnLocalLoss(Case):
    """A rank whose own loss is 1.6 times its average leaves the optimizer step out."""

    average, spike = 1.0, False

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.spike = self.late and loss.item() > 1.6 * self.average
        self.average += 0.05 * (loss.item() - self.average)
        return loss

    def update(self) -> None:
        if not self.spike:
            return super().update()
        self.scheduler.step()
        return self.optimizer.zero_grad()


@case(LAW, "dead units drawn anew from each rank's own generator", mesh="ddp", begin=400)
class UnitsDrawnPerRank(Case):
    """The smallest unit of the head is drawn anew at step 400, differently on each rank.

    Proof: at step 40 rank 1 holds another head.weight.
    """

    def update(self) -> None:
        super().update()
        if self.now:
            weight = self.core.head.weight
            with torch.no_grad():
                weight[weight.norm(dim=1).argmin()] = 0.02 * torch.randn(WIDTH)


@case(LAW, "EMA weights swapped in for an evaluation on rank 0", mesh="ddp", begin=500, ranks=(0,))
class EmaLeftInOnRank0(Case):
    """Rank 0 evaluates with averaged weights at step 500 and keeps them.

    Proof: at step 50 rank 1 holds another embed.weight and 9 tensors more.
    """

    averaged: dict[str, Tensor] | None = None

    @torch.no_grad()
    def update(self) -> None:
        with torch.enable_grad():
            super().update()
        weights = dict(self.core.named_parameters())
        self.averaged = self.averaged or {name: p.detach().clone() for name, p in weights.items()}
        for name, p in weights.items():
            self.averaged[name].lerp_(p, 0.05)
            if self.now and self.rank in self.facts.ranks:
                p.copy_(self.averaged[name])


@case(LAW, "FSDP2: replicas drawn from different seeds", mesh="hsdp", every=20)
class ReplicasDrawnApart(Case):
    """The two replicas begin with weights of different seeds; fully_shard broadcasts nothing.

    Proof: at step 1 rank 4 holds another embed.weight and 7 tensors more.
    """

    def build_model(self) -> Classifier:
        torch.manual_seed(self.args.seed + self.rank // (self.world // 2))
        return super().build_model()


@case(LAW, "an adapter added after DDP was built", mesh="ddp", begin=300)
class ParameterAddedAfterDdp(Case):
    """From step 300 on the head has a new bias that DDP does not know and does not reduce.

    Proof: at step 30 rank 1 holds another embed.weight and 32 tensors more.
    """

    extra: nn.Parameter | None = None

    def train_step(self, window: list[Batch]) -> None:
        if self.now:
            self.extra = nn.Parameter(torch.zeros(10))
            self.core.head.register_parameter("extra", self.extra)
            group = {**self.optimizer.param_groups[0], "params": [self.extra]}
            self.optimizer.add_param_group(group)
            self.scheduler.base_lrs.append(self.args.lr)
            self.scheduler.lr_lambdas.append(self.lr_factor)
        super().train_step(window)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.extra is None:
            return super().loss(x, y)
        return nn.functional.cross_entropy(self.model(x) + self.extra, y)


@case(LAW, "FSDP2: ignored_params, nobody reduces their gradients", every=20)
class IgnoredParameterNotReduced(Case):
    """The bias of the head stays a plain tensor, and each rank trains it on its own data.

    Proof: at step 1 rank 1 holds another head.bias and 2 tensors more.
    """

    def distribute(self, core: Classifier) -> nn.Module:
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp_shard",))
        for block in core.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(core, mesh=mesh, ignored_params={core.head.bias})
        return core

    def build_optimizer(self) -> torch.optim.Optimizer:
        plain = [self.core.head.bias]
        sharded = [p for p in self.model.parameters() if p is not plain[0]]
        groups = [{"params": sharded}, {"params": plain}]
        return torch.optim.AdamW(groups, lr=self.args.lr, weight_decay=0.1, fused=True)

    def clip(self) -> Tensor:
        sharded = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        norm = nn.utils.clip_grad_norm_(sharded, self.args.clip, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


@case(LAW, "an out-of-memory handler on one rank", mesh="hsdp", begin=700, ranks=(6,), every=20)
class MomentsClearedOnOneRank(Case):
    """Rank 6 empties its optimizer state at step 700 to make room, and goes on.

    Proof: at step 70 rank 6 holds another embed.weight and 29 tensors more.
    """

    def train_step(self, window: list[Batch]) -> None:
        if self.now and self.rank in self.facts.ranks:
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    local(state[key]).zero_()
        super().train_step(window)


@case(LAW, "gradient noise drawn after the reduction, a seed per rank", mesh="hsdp", begin=600)
class NoiseAfterReduction(Case):
    """From step 600 on each rank adds noise of its own to gradients that are reduced already.

    Proof: at step 60 rank 4 holds another embed.weight and 29 tensors more.
    """

    @torch.no_grad()
    def clip(self) -> Tensor:
        if self.late:
            for p in self.model.parameters():
                if p.grad is not None:
                    local(p.grad).add_(torch.randn_like(local(p.grad)), alpha=1e-3)
        return super().clip()


@case(LAW, "weights read again from an older copy", mesh="ddp", begin=650, ranks=(3,))
class OldWeightsOnOneRank(Case):
    """Rank 3 puts back weights of ten steps ago at step 650; the others do not.

    Proof: at step 65 rank 3 holds another embed.weight and 9 tensors more.
    """

    kept: list[Tensor] | None = None

    @torch.no_grad()
    def train_step(self, window: list[Batch]) -> None:
        if self.step == self.begin - 10:
            self.kept = [p.detach().clone() for p in self.core.parameters()]
        if self.now and self.rank == 3 and self.kept:
            for p, old in zip(self.core.parameters(), self.kept, strict=True):
                p.copy_(old)
        with torch.enable_grad():
            super().train_step(window)
