"""A small ViT with stochastic depth and activation checkpointing under FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from vit import PathDropper, ViT


def gratings(n, gen):
    y = torch.randint(0, 8, (n,), generator=gen)
    ys, xs = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    a = (y * torch.pi / 8)[:, None, None]
    phase = 6.3 * torch.rand(n, 1, 1, generator=gen)
    img = torch.sin(1.1 * (xs * a.cos() + ys * a.sin()) + phase)
    return (img + 0.3 * torch.randn(img.shape, generator=gen))[:, None], y


class Run:
    steps, batch, lr = 24, 32, 3e-3

    def __init__(self, rank, world):
        self.rank, self.world, self.step = rank, world, 0
        torch.manual_seed(6)
        self.model = ViT(PathDropper(0.3, 50, rank, world))
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, self.steps)
        self.gen = torch.Generator().manual_seed(51)

    def local(self, *tensors):
        n = tensors[0].shape[0] // self.world
        return [t[self.rank * n:(self.rank + 1) * n] for t in tensors]

    def train(self, after_step):
        self.model.train()
        while self.step < self.steps:
            x, y = self.local(*gratings(self.batch, self.gen))
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.sched.step()
            self.step += 1
            after_step(self, loss.item())

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = self.local(*gratings(256, torch.Generator().manual_seed(52)))
        logits = self.model(x)
        sums = torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).float().sum()])
        dist.all_reduce(sums)
        return (sums / 256).tolist()

    def state(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "sched": self.sched.state_dict(), "step": self.step,
                "gen": self.gen.get_state(), "drop": self.model.dropper.gen.get_state()}

    def load(self, folder):
        sd = self.state()
        dcp.load(sd, checkpoint_id=folder)
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.sched.load_state_dict(sd["sched"])
        self.gen.set_state(sd["gen"])
        self.model.dropper.gen.set_state(sd["drop"])
        self.step = sd["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    run = Run(dist.get_rank(), dist.get_world_size())
    if args.resume:
        run.load(os.path.join(args.resume, max(os.listdir(args.resume))))

    def after_step(run, loss):
        if run.rank == 0 and run.step % 4 == 0:
            print(f"step {run.step} loss {loss:.4f}", flush=True)
        if args.out and args.save_every and run.step % args.save_every == 0:
            dcp.save(run.state(), checkpoint_id=os.path.join(args.out, f"{run.step:06d}"))

    run.train(after_step)
    loss, acc = run.validate()
    if run.rank == 0:
        print(f"validation loss {loss:.5f} accuracy {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
