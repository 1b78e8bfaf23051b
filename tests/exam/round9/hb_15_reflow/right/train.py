"""Rectified flow and one round of reflow: the second flow learns from the couplings of the first."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from flow import Velocity, euler, images, noise
from sampler import LossAwareSampler

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build():
    model = Velocity()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


class Stage:
    """One of the two flows: its model, optimizer, time sampler and random stream."""

    def __init__(self, number, lr, source=None):
        torch.manual_seed(50)
        self.number, self.model = number, build()
        if source is not None:  # the second flow starts at the first one's weights
            set_model_state_dict(self.model, get_model_state_dict(source))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        self.times = LossAwareSampler()
        self.gen = torch.Generator().manual_seed(60 + number)
        self.step = 0

    def state(self):
        m, o = get_state_dict(self.model, self.opt, options=FULL)
        return {"model": m, "opt": o, "times": self.times.state_dict(), "gen": self.gen.get_state(), "step": self.step}

    def load(self, st):
        set_state_dict(self.model, self.opt, model_state_dict=st["model"], optim_state_dict=st["opt"], options=FULL)
        self.times.load_state_dict(st["times"])
        self.gen.set_state(st["gen"])
        self.step = st["step"]


def train_step(stage, teacher, batch, rank, world):
    ids = torch.randint(0, 2000, (batch,), generator=stage.gen)
    t, weight, bins = stage.times.draw(batch, stage.gen)
    rows = torch.arange(batch)[rank::world]
    x0 = noise(ids[rows])
    x1 = images(ids[rows]) if teacher is None else euler(teacher, x0, steps=3)
    tt = t[rows, None]
    error = (stage.model((1 - tt) * x0 + tt * x1, t[rows]) - (x1 - x0)).pow(2).mean(1)
    loss = (weight[rows] * error).mean()
    stage.opt.zero_grad()
    loss.backward()
    stage.opt.step()
    stage.times.record(batch, rows, bins, error.detach())
    stage.step += 1
    return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, nargs=2, default=[18, 10])
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="flows")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    stage, teacher = Stage(1, args.lr), None
    if args.resume:
        ck = torch.load(os.path.join(args.resume, max(os.listdir(args.resume))))
        if ck["number"] == 2:
            teacher = build().requires_grad_(False)
            set_model_state_dict(teacher, ck["teacher"], options=FULL)
            stage = Stage(2, args.lr * 0.3)
        stage.load(ck["stage"])

    while True:
        if stage.step == args.steps[stage.number - 1]:
            if stage.number == 2:
                break
            teacher = stage.model.requires_grad_(False)
            stage = Stage(2, args.lr * 0.3, source=teacher)
        loss = train_step(stage, teacher, args.batch, rank, world)
        if stage.step % 6 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                p = stage.times.probs()
                print(f"flow {stage.number} step {stage.step} loss {loss.item() / world:.4f} p(t) {p.min():.3f}..{p.max():.3f}")
        done = stage.step + (args.steps[0] if stage.number == 2 else 0)
        if args.save_every and done % args.save_every == 0:
            ck = {"number": stage.number, "stage": stage.state()}
            if teacher is not None:
                ck["teacher"] = get_model_state_dict(teacher, options=FULL)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(ck, os.path.join(args.out, f"{done:05d}.pt"))
            dist.barrier()

    ids = torch.arange(64)
    ends = [euler(stage.model, noise(ids), k) for k in (1, 8)]
    if rank == 0:
        print(f"one step against eight steps: {(ends[0] - ends[1]).pow(2).mean():.4f}")
    if args.export:
        out = {"flow1": get_model_state_dict(teacher, options=FULL), "flow2": get_model_state_dict(stage.model, options=FULL)}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
