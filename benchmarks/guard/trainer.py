"""A right FSDP2 training script: `torchrun --nproc-per-node 8 trainer.py --mesh fsdp --out a`.

A fault or a variant of this folder is a subclass of `Trainer` (`--case NAME`).
"""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from model import FEATURES, Batch, Classifier, Points, ResumableSampler
from options import parse
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = self.epoch = self.batch = 0
        torch.manual_seed(args.seed)
        self.core = self.build_model()
        self.model = self.distribute(self.core)
        self.optimizer = self.build_optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_factor)
        self.data = self.build_data()
        self.per_rank = args.global_batch // args.accumulate // self.world
        self.sampler = self.build_sampler()
        self.loader = DataLoader(self.data, batch_size=self.per_rank, sampler=self.sampler)
        torch.manual_seed(args.seed + 1 + self.rank)
        if args.resume and (newest := self.newest_checkpoint()):
            self.load(newest)

    def build_model(self) -> Classifier:
        return Classifier(self.args.depth)

    def distribute(self, core: Classifier) -> nn.Module:
        if self.args.mesh == "ddp":
            return DistributedDataParallel(core)
        shape: tuple[int, ...] = (self.world,)
        names: tuple[str, ...] = ("dp_shard",)
        if self.args.mesh == "hsdp":
            shape, names = (2, self.world // 2), ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in core.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(core, mesh=mesh)
        return core

    def build_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        return torch.optim.AdamW(parameters, lr=self.args.lr, weight_decay=0.1, fused=True)

    def build_data(self) -> Points:
        return Points(self.args.samples, self.args.seed)

    def build_sampler(self) -> ResumableSampler:
        return ResumableSampler(self.data, self.world, self.rank, shuffle=True, seed=self.args.seed)

    def lr_factor(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / self.args.warmup)
        return float(warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.args.steps)))

    def fit(self) -> None:
        while self.step < self.args.stop_at:
            self.begin_epoch()
            for window in self.windows():
                self.train_step(window)
                self.after_step()
                if self.step == self.args.stop_at:
                    return
            self.epoch, self.batch = self.epoch + 1, 0

    def begin_epoch(self) -> None:
        self.sampler.set_epoch(self.epoch)
        self.sampler.start = self.batch * self.per_rank

    def windows(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step; the last window of an epoch may be shorter."""
        batches = iter(self.loader)
        while window := list(islice(batches, self.args.accumulate)):
            self.batch += len(window)
            yield window

    def train_step(self, window: list[Batch]) -> None:
        totals = torch.zeros(1 + FEATURES)
        for i, (x, y) in enumerate(window):
            totals[0] += self.micro_step(x, y, self.share(i, window), i == len(window) - 1)
            totals[1:] += x.mean(0)
        norm = self.clip()
        self.update()
        self.step += 1
        if self.step % 10 == 0:
            totals = self.mean_over_ranks(totals / len(window))
            self.observe(totals[1:])
            if self.step % 50 == 0:
                self.log(totals[0].item(), norm.item())

    def micro_step(self, x: Tensor, y: Tensor, share: float, last: bool) -> Tensor:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        ddp = self.model if isinstance(self.model, DistributedDataParallel) else None
        with ddp.no_sync() if ddp and not last else nullcontext():
            loss = self.loss(x, y)
            (loss * share).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def share(self, i: int, window: list[Batch]) -> float:
        return 1 / len(window)

    def mean_over_ranks(self, totals: Tensor) -> Tensor:
        dist.all_reduce(totals)
        return totals / self.world

    def observe(self, mean: Tensor) -> None:
        self.core.input_mean.lerp_(mean, 0.1)

    def clip(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def log(self, loss: float, norm: float) -> None:
        if self.rank == 0:
            print(f"step {self.step} loss {loss:.5f} norm {norm:.5f}", flush=True)

    def after_step(self) -> None:
        if self.args.save_every and self.step % self.args.save_every == 0:
            self.save(self.args.out / f"step_{self.step:06d}")
        if self.step == self.args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        position = {"step": self.step, "epoch": self.epoch, "batch": self.batch}
        schedule = self.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "position": position}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(torch.get_rng_state(), folder / f"rng_{self.rank}.pt")
        dcp.save(self.state(), checkpoint_id=folder)  # type: ignore[attr-defined]

    def newest_checkpoint(self) -> Path | None:
        return max((path.parent for path in self.args.out.glob("step_*/.metadata")), default=None)

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
        self.restore(state)
        self.load_generator(folder)

    def restore(self, state: dict[str, Any]) -> None:
        weights = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **weights)
        self.scheduler.load_state_dict(state["schedule"])
        position = state["position"]
        self.step, self.epoch, self.batch = (position[k] for k in ("step", "epoch", "batch"))

    def load_generator(self, folder: Path) -> None:
        """Its own generator again; a rank that the saving run did not have begins a new one."""
        if (file := folder / f"rng_{self.rank}.pt").exists():
            torch.set_rng_state(torch.load(file))
        else:
            torch.manual_seed(self.args.seed + 1 + self.rank + 1000 * self.step)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    trainer = Trainer
    if args.case:
        from cases import trainer_of

        trainer = trainer_of(args.case)
    trainer(args).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
