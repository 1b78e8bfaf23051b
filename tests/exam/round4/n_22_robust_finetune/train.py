"""Fine-tuning a pretrained encoder on heavy-tailed returns; the input layer stays frozen."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def returns(n=640, days=16, seed=81):
    """Sixteen past returns of an asset with volatility clusters; the next one has a weak signal and fat tails."""
    g = torch.Generator().manual_seed(seed)
    vol = torch.exp(0.5 * torch.randn(n, 1, generator=g))
    x = vol * torch.randn(n, days, generator=g)
    shock = torch.randn(n, generator=g) / torch.rand(n, generator=g).clamp(min=0.02).sqrt()
    y = 0.8 * x[:, -1] - 0.5 * x[:, -2:].mean(1) + 0.3 * x.std(1) + 0.3 * vol.squeeze(1) * shock
    return x, y


class Encoder(nn.Module):
    def __init__(self, days=16, width=32):
        super().__init__()
        self.inp = nn.Linear(days, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        for b in self.blocks:
            h = h + b(h)
        return self.out(h).squeeze(-1)


def pretrained():
    """Stands for a file of weights: the encoder after a short autoregressive warm-up on other data."""
    torch.manual_seed(0)
    net = Encoder()
    x, _ = returns(seed=80)
    opt = torch.optim.Adam(net.parameters(), lr=0.005)
    for _ in range(10):
        loss = (net(x) - x.mean(1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.zero_grad()
    return net


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--clip", type=float, default=0.5)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = pretrained()
    net.inp.requires_grad_(False)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(net.inp, mesh=mesh)
    for b in net.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(net, mesh=mesh)

    trainable = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.SGD(trainable, lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.steps, pct_start=0.2)

    x, y = returns()
    for step in range(args.steps):
        pick = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:args.batch].chunk(world)[rank]
        loss = (net(x[pick]) - y[pick]).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, args.clip)
        opt.step()
        sched.step()
        opt.zero_grad()
        dist.all_reduce(loss.detach_())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} mse {loss.item() / world:.4f} lr {sched.get_last_lr()[0]:.5f}", flush=True)

    with torch.no_grad():
        err = (net(x) - y).abs().median()
    if rank == 0:
        print(f"median absolute error {err:.4f}")
    if args.export:
        full = {k: v.full_tensor() for k, v in net.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
