"""Faults of the law `resume-as-saved`: what comes back from a checkpoint is not what was saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cases import Case, Launch, case
from model import WIDTH, Batch, Classifier
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

LAW = "resume-as-saved"
TWICE = (Launch(until=300), Launch(until=600))
KILLED = (Launch(until=370, kill=True), Launch(until=600))
THIRD = (Launch(until=200), Launch(until=400), Launch(until=600), Launch(4, 800))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@case(LAW, "catalog of public reports: only the weights are restored", begin=300, launches=TWICE)
class OptimizerNotRestored(Case):
    """A resume begins with empty moments of AdamW.

    Proof: after the resume at step 30 embed.weight.exp_avg and 19 more are not as saved.
    """

    def restore(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        self.scheduler.load_state_dict(state["schedule"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.scheduler.get_last_lr()[0]
        self.step, self.epoch, self.batch = state["position"].values()
        self.optimizer.state.clear()


@case(LAW, "catalog of public reports: the schedule is not restored", begin=300, launches=TWICE)
class ScheduleNotRestored(Case):
    """A resume warms up again: its schedule counts from 0.

    Proof: after the resume at step 30 lr is not as saved.
    """

    def restore(self, state: dict[str, Any]) -> None:
        fresh = self.scheduler.state_dict()
        super().restore({**state, "schedule": fresh})


@case(LAW, "settings of the flags over those of the checkpoint", begin=300, launches=KILLED)
class SettingsOverwritten(Case):
    """The run lowers weight decay at step 100; a resume has the one of the flags again.

    Proof: after the resume at step 30 weight_decay is not as saved.
    """

    def train_step(self, window: list[Batch]) -> None:
        if self.step == min(99, self.begin // 2):
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.01
        super().train_step(window)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1


class PackedLion(torch.optim.Optimizer):
    """Lion whose momentum is int8 with one scale a row, in plain tensors of its own shards."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, local(p), local(p.grad), group)

    def move(self, p: Tensor, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        rows = grad.reshape(len(grad), p.numel() // len(p))
        state = self.state[p]
        if not state:
            state["packed"] = torch.zeros(rows.shape, dtype=torch.int8)
            state["scale"] = torch.zeros(len(rows), 1)
        m = state["packed"].float() * state["scale"]
        m = group["beta"] * m + (1 - group["beta"]) * rows
        weight.add_(m.sign().reshape(weight.shape), alpha=-group["lr"])
        state["scale"].copy_(m.abs().amax(1, keepdim=True) / 127)
        state["packed"].copy_((m / state["scale"].clamp_min(1e-12)).round())


@case(LAW, "databricks/flashoptim#3", begin=300, launches=TWICE, flags=("--lr", "1e-4"))
class PackedStateOfOneRank(Case):
    """Plain int8 momentum goes through DCP, which keeps one rank's for all.

    Proof: after the resume at step 30 embed.weight.packed and 19 more are not as saved.
    """

    def build_model(self) -> Classifier:
        core = super().build_model()
        core.head = nn.Linear(WIDTH, 16)  # even shards, or DCP would refuse their sizes
        return core

    def build_optimizer(self) -> torch.optim.Optimizer:
        return PackedLion(self.model.parameters(), lr=self.args.lr)


@case(LAW, "generators seeded at every start", begin=300, launches=TWICE)
class GeneratorSeededAgain(Case):
    """A resume draws the dropout masks of the first steps again.

    Proof: after the resume at step 30 generators is not as saved.
    """

    def load_generator(self, folder: Path) -> None:
        torch.manual_seed(self.args.seed + 1 + self.rank)


@case(LAW, "one generator state in the checkpoint", begin=300, launches=TWICE)
class GeneratorOfRank0(Case):
    """Every rank resumes with the generator of rank 0: the same dropout masks everywhere.

    Proof: after the resume at step 30 generators is not as saved.
    """

    def load_generator(self, folder: Path) -> None:
        torch.set_rng_state(torch.load(folder / "rng_0.pt"))


@case(LAW, "a layer unfrozen at a step, not from it on", begin=300, launches=TWICE)
class FrozenAgainAfterResume(Case):
    """The first layer is unfrozen when the step is 200; a resume at 300 leaves it frozen.

    Proof: after the resume at step 30 trainable embed.weight and 5 more are not as saved.
    """

    def build_model(self) -> Classifier:
        core = super().build_model()
        core.embed.requires_grad_(False)
        return core

    def train_step(self, window: list[Batch]) -> None:
        if self.step == self.begin * 2 // 3:
            self.core.embed.requires_grad_(True)
        super().train_step(window)


@case(LAW, "averaged weights that begin anew", begin=300, launches=TWICE, mesh="ddp")
class EmaNotRestored(Case):
    """The averaged weights are in no checkpoint: a resume begins them from the weights.

    Proof: after the resume at step 30 ema module.embed.weight and 9 more are not as saved.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)  # type: ignore[no-untyped-call]
        self.ema = torch.optim.swa_utils.AveragedModel(self.core, multi_avg_fn=average)

    def update(self) -> None:
        super().update()
        self.ema.update_parameters(self.core)


@case(LAW, "optimizer files per rank, read if their number fits", begin=600, launches=THIRD)
class MomentsLostOnOtherRanks(Case):
    """The third resume is on 4 ranks: the files of 8 ranks do not fit and are left out."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        if len(list(folder.glob("rng_*.pt"))) != self.world:
            self.optimizer.state.clear()


@case(LAW, "strict=False hides a renamed layer", begin=300, launches=TWICE)
class HeadNotRestored(Case):
    """The head is saved under another name and keeps its first weights after a resume.

    Proof: after the resume at step 30 head.weight and 1 more are not as saved.
    """

    def restore(self, state: dict[str, Any]) -> None:
        super().restore({**state, "model": {**state["model"], **self.own_head}})

    def load(self, folder: Path) -> None:
        weights: dict[str, Any] = dict(get_model_state_dict(self.model))
        self.own_head = {k: v.clone() for k, v in weights.items() if "head" in k}
        super().load(folder)


@case(LAW, "a buffer that is in no state dict", begin=300, launches=KILLED)
class BufferNotSaved(Case):
    """The running mean of the inputs is not persistent and is zero again after a resume.

    Proof: after the resume at step 30 input_mean is not as saved.
    """

    def build_model(self) -> Classifier:
        core = super().build_model()
        core.register_buffer("input_mean", core.input_mean, persistent=False)
        return core


@case(LAW, "a checkpoint written in two places", begin=300, launches=KILLED)
class WeightsNewerThanMoments(Case):
    """Weights are written every 50 steps over the old ones, all else every 100; then a kill.

    Proof: after the resume at step 30 embed.weight and 9 more are not as saved.
    """

    def after_step(self) -> None:
        if self.step % max(1, self.begin // 6) == 0:
            weights = get_model_state_dict(self.model)
            place = self.args.out / "weights"
            dcp.save(weights, checkpoint_id=place)  # type: ignore[attr-defined]
        super().after_step()

    def restore(self, state: dict[str, Any]) -> None:
        place = self.args.out / "weights"
        dcp.load(state["model"], checkpoint_id=place)  # type: ignore[attr-defined]
        super().restore(state)


@case(LAW, "shards read by a rank that counts in another order", begin=400, launches=THIRD[:3])
class ShardsOfTheNeighbour(Case):
    """The second resume gives ranks 2 and 3 each other's moments of the block.

    Proof: after the resume at step 40 blocks.0.norm.weight.exp_avg and 5 more are not as
    saved.
    """

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.step < self.begin:
            return
        for p in self.core.blocks.parameters():
            moment = self.optimizer.state[p]["exp_avg"]
            parts = list(moment.full_tensor().chunk(self.world))
            if self.rank in (2, 3) and len(parts) == self.world:
                local(moment).copy_(parts[5 - self.rank])


@case(LAW, "the step is taken from the epoch", begin=258, launches=TWICE)
class StepOfTheEpoch(Case):
    """A resume takes the step at which its epoch began for the step it goes on from.

    Proof: after the resume at step 26 step is not as saved.
    """

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.step = state["position"]["step"] - state["position"]["batch"]
