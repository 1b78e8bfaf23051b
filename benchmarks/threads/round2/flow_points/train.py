"""Flow matching on a 2-D toy distribution, with an exponential average of the weights.

A conditional MLP predicts the velocity that carries noise to data; samples are drawn
with a few Euler steps from the averaged weights.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=64, help="over all ranks")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--ema-decay", type=float, default=0.9)
    p.add_argument("--val-every", type=int, default=20)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.time = nn.Linear(8, width)

    def forward(self, x, temb):
        return x + self.fc2(torch.nn.functional.silu(self.fc1(self.norm(x + self.time(temb)))))


class VelocityNet(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        freq = 2.0 ** torch.arange(4, device=x.device)
        angle = t[:, None] * freq * torch.pi
        temb = torch.cat([angle.sin(), angle.cos()], dim=-1)
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, temb)
        return self.out(h)


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1.0 - self.decay)

    @torch.no_grad()
    def swap(self, model):
        for name, p in model.named_parameters():
            tmp = p.detach().clone()
            p.copy_(self.shadow[name])
            self.shadow[name].copy_(tmp)


def draw(n, seed):
    """Pairs of data points (two arcs), noise and times; the same on every rank."""
    gen = torch.Generator().manual_seed(seed)
    angle = torch.rand(n, generator=gen) * torch.pi
    side = torch.randint(2, (n,), generator=gen) * 2.0 - 1.0
    data = torch.stack([angle.cos() + 0.5 * side, side * angle.sin()], dim=1)
    data = data + 0.05 * torch.randn(n, 2, generator=gen)
    return data, torch.randn(n, 2, generator=gen), torch.rand(n, generator=gen)


def flow_loss(model, data, noise, t):
    x = (1 - t[:, None]) * noise + t[:, None] * data
    return (model(x, t) - (data - noise)).square().mean()


class Trainer:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = VelocityNet(args.width).to(device)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model, reshard_after_forward=True)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def local(self, n, seed):
        return [x[self.rank::self.world].to(self.device) for x in draw(n, seed)]

    @torch.no_grad()
    def validate(self):
        loss = flow_loss(self.model, *self.local(256, 99))
        dist.all_reduce(loss)
        return loss.item() / self.world

    @torch.no_grad()
    def sample_stats(self, n=256, euler=6):
        _, x, _ = self.local(n, 123)
        for i in range(euler):
            t = torch.full((len(x),), i / euler, device=self.device)
            x = x + self.model(x, t) / euler
        stats = torch.stack([x.square().sum(), x.abs().sum()])
        dist.all_reduce(stats)
        return (stats / n).tolist()

    def log(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def fit(self):
        args = self.args
        # a pass over the validation set before anything is trained
        self.log(f"sanity check: val {self.validate():.6f}")
        self.ema = EMA(self.model, args.ema_decay)
        for step in range(1, args.steps + 1):
            loss = flow_loss(self.model, *self.local(args.batch_size, 1000 + step))
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.ema.update(self.model)
            if step % args.val_every == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                self.ema.swap(self.model)
                val = self.validate()
                self.ema.swap(self.model)
                self.log(f"step {step:3d}  loss {shown.item() / self.world:.6f}  ema val {val:.6f}")
        self.ema.swap(self.model)
        second, first = self.sample_stats()
        self.log(f"samples: E|x|^2 {second:.5f}  E|x|_1 {first:.5f}")


def main():
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    Trainer(args, device).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
