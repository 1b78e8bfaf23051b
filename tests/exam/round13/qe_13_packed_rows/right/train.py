import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import packed
from netw import RingNet


class Session:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(77)
        self.model = RingNet()
        for hop in self.model.hops:
            fully_shard(hop)
        fully_shard(self.model)
        self.m = {n: torch.zeros_like(p, requires_grad=False) for n, p in self.model.named_parameters()}
        self.v = {n: torch.zeros_like(p, requires_grad=False) for n, p in self.model.named_parameters()}
        self.step = 0

    def tensors(self):
        out = {"w/" + n: p.detach() for n, p in self.model.named_parameters()}
        out.update({"m/" + n: t for n, t in self.m.items()})
        out.update({"v/" + n: t for n, t in self.v.items()})
        return out

    def batch(self):
        g = torch.Generator().manual_seed(300 + self.step)
        x = torch.randn(32, 12, 3, generator=g)
        load = x[..., 0].relu().sum(1, keepdim=True) / 4 + x[..., 1].abs().mean(1, keepdim=True)
        return x.chunk(self.world)[self.rank], load.chunk(self.world)[self.rank]

    @torch.no_grad()
    def update(self):
        a = self.args
        for n, p in self.model.named_parameters():
            self.m[n].lerp_(p.grad, 0.1)
            self.v[n].mul_(0.98).addcmul_(p.grad, p.grad, value=0.02)
            m, v = self.m[n] / (1 - 0.9**self.step), self.v[n] / (1 - 0.98**self.step)
            p.sub_(m / (v.sqrt() + 1e-5), alpha=a.lr * min(1.0, self.step / 5))
            p.grad = None

    def run(self):
        a = self.args
        if a.resume:
            self.step = packed.read(packed.newest(a.resume), self.tensors())["step"]
        while self.step < a.steps:
            x, y = self.batch()
            loss = (self.model(x) - y).abs().mean()
            loss.backward()
            self.step += 1
            self.update()
            if self.step % 7 == 0:
                mean = loss.detach() / self.world
                dist.all_reduce(mean)
                if self.rank == 0:
                    print(f"step {self.step} mae {mean.item():.5f}", flush=True)
            if a.save_every and self.step % a.save_every == 0:
                packed.write(os.path.join(a.out, f"{self.step:06d}"), self.tensors(), {"step": self.step})


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=28)
    cli.add_argument("--lr", type=float, default=6e-3)
    cli.add_argument("--out")
    cli.add_argument("--save-every", type=int, default=0)
    cli.add_argument("--resume")
    dist.init_process_group("gloo")
    Session(cli.parse_args()).run()
    dist.destroy_process_group()
