"""Adapt a frozen model to preferences: torchrun --standalone --nproc-per-node 2 finetune.py --recipe recipe.json --output out"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from base_model import load_base
from lora import add_adapters, export
from objective import Terms, better_tokens, terms
from recipe import Recipe, read
from saving import collect, restore, save
from sharding import optimizer_for, shard, trainable
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from pairs import PairStream


class Run:
    """One run of one rank."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        model = add_adapters(load_base(recipe.base), recipe.adapter).to(device)
        mesh = init_device_mesh(device.type, (self.world,), mesh_dim_names=("dp",))
        self.model = shard(model, mesh, recipe.memory)
        self.optimizer = optimizer_for(self.model, recipe.train.lr, recipe.train.weight_decay)
        self.data = PairStream(
            recipe.folder / recipe.data.file,
            recipe.base.context,
            recipe.train.global_rows,
            recipe.data.seed,
            self.rank,
            self.world,
        )
        self.steps = recipe.train.epochs * self.data.steps_per_epoch
        warmup = recipe.train.warmup
        self.schedule = LambdaLR(
            self.optimizer, lambda step: min((step + 1) / (warmup + 1), 1 - max(0, step - warmup) / self.steps)
        )
        self.step = 0
        if recipe.resume_from:
            self.step, self.data.taken = restore(
                recipe.output, recipe.resume_from, self.model, self.optimizer, self.schedule
            )

    def train(self) -> None:
        """All steps that are left, and the export."""
        if self.rank == 0:
            whole = sum(parameter.numel() for parameter in self.model.parameters())
            ours = sum(parameter.numel() for parameter in trainable(self.model).values())
            print(f"{ours} of {whole} parameters are trained, from step {self.step} to {self.steps}", flush=True)
        while self.step < self.steps:
            shown = self.one_step()
            self.step += 1
            if self.rank == 0:
                text = " ".join(f"{key} {value:.6f}" for key, value in shown.items())
                print(f"step {self.step} {text}", flush=True)
            if self.step % self.recipe.save_steps == 0:
                save(self.recipe.output, collect(self.model, self.optimizer, self.schedule, self.data.taken, self.step))
        export(self.model, self.recipe.adapter, self.recipe.output / "adapter")

    def one_step(self) -> dict[str, float]:
        """Forward and backward over all pieces, one update."""
        pieces = [piece.to(self.device) for piece in self.data.next_step(self.recipe.train.rows_per_step)]
        tokens = self.total(torch.tensor(float(sum(better_tokens(piece) for piece in pieces)), device=self.device))
        pairs = self.recipe.train.global_rows
        sums = torch.zeros(4, device=self.device)
        for index, piece in enumerate(pieces):
            self.model.set_requires_gradient_sync(index == len(pieces) - 1)
            part = terms(self.model, piece, self.recipe.loss)
            self.loss(part, pairs, tokens).backward()
            sums += torch.stack([value.detach().float() for value in part])
        norm = torch.nn.utils.clip_grad_norm_(list(trainable(self.model).values()), self.recipe.train.max_norm)
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        preference, likelihood, margin, won = self.total(sums).tolist()
        return {
            "preference": preference / pairs,
            "likelihood": likelihood / float(tokens),
            "margin": margin / pairs,
            "won": won / pairs,
            "grad_norm": float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
            "lr": rate,
        }

    def loss(self, part: Terms, pairs: int, tokens: Tensor) -> Tensor:
        """What this rank adds to the mean over the world; FSDP will divide by the number of ranks."""
        mean = part.preference / pairs + self.recipe.loss.sft_weight * part.likelihood / tokens
        return mean * self.world

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks."""
        dist.all_reduce(value)
        return value


def device_of_rank() -> torch.device:
    """This rank's device, with the group joined."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def main() -> None:
    """Read, train, leave."""
    recipe = read()
    device = device_of_rank()
    try:
        Run(recipe, device).train()
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
