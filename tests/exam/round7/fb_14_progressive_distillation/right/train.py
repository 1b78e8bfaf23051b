"""Progressive distillation: a diffusion model is trained on data, then halves its sampling steps phase by phase.
At the start of each phase the teacher takes the student's weights and the student gets a new optimizer."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from diffusion import XPredictor, alpha_sigma, teacher_target
from phases import TOTAL, locate


def make_model():
    torch.manual_seed(15)
    model = XPredictor()
    for layer in model.mid:
        fully_shard(layer)
    # resharding after the forward too: the teacher is only used in forwards
    return fully_shard(model, reshard_after_forward=True)


def batch(update, n, steps, rank, world):
    g = torch.Generator().manual_seed(600 + update)
    phase = 6.2832 * torch.rand(n, 1, generator=g)
    x = torch.sin(phase + torch.arange(12) * 0.7)
    eps = torch.randn(n, 12, generator=g)
    u = torch.rand(n, generator=g)
    t = 0.02 + 0.96 * u if steps == 0 else (1 + (u * steps).floor()) / steps
    return [v[rank::world] for v in (x, eps, t)]


class Distiller:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.student, self.teacher = make_model(), make_model()
        self.teacher.requires_grad_(False)
        self.opt = None
        self.update = 0

    @torch.no_grad()
    def enter(self, phase):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.copy_(s)
        self.new_optimizer(phase)

    def new_optimizer(self, phase):
        self.opt = torch.optim.Adam(self.student.parameters(), lr=phase.lr, betas=(0.9, 0.99))

    def step(self):
        _, phase, position = locate(self.update)
        if position == 0:
            self.enter(phase)
        for group in self.opt.param_groups:
            group["lr"] = phase.lr * (1 - position / phase.updates)
        x, eps, t = batch(self.update, self.args.batch, phase.steps, self.rank, self.world)
        a, s = alpha_sigma(t)
        z = a * x + s * eps
        target = x if phase.steps == 0 else teacher_target(self.teacher, z, t, phase.steps)
        weight = (a / s).square().clamp(1.0, 5.0)  # truncated signal to noise ratio
        # a mean over the global batch, so that the weights are not normalised per rank
        loss = (weight * (self.student(z, t) - target).square()).sum() * self.world / (self.args.batch * x.shape[1])
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.update += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return phase.name, loss.item() / self.world

    def state(self):
        return {
            "student": self.student.state_dict(),
            "teacher": self.teacher.state_dict(),
            "opt": get_optimizer_state_dict(self.student, self.opt),
            "update": self.update,
        }

    def save(self):
        dcp.save(self.state(), checkpoint_id=f"{self.args.out}/update-{self.update}")

    def load(self, root):
        newest = max((d for d in os.listdir(root) if d.startswith("update-")), key=lambda d: int(d[7:]))
        self.update = int(newest[7:])
        # the optimizer belongs to the phase of the update that was done last
        self.new_optimizer(locate(self.update - 1)[1])
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(root, newest))
        self.student.load_state_dict(state["student"])
        self.teacher.load_state_dict(state["teacher"])
        set_optimizer_state_dict(self.student, self.opt, state["opt"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    args = p.parse_args()
    dist.init_process_group("gloo")
    run = Distiller(args)
    if args.resume:
        run.load(args.resume)
    while run.update < TOTAL:
        name, loss = run.step()
        if run.rank == 0:
            print(f"update {run.update:3d} {name:9s} loss {loss:.5f}")
        if args.save_every and run.update % args.save_every == 0:
            run.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
