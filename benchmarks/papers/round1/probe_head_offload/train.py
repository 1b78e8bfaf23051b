"""Distil a large teacher into a small encoder with a replicated probe head.

The encoder is sharded by FSDP2. The head is tiny, stays whole on every rank, and its
gradients are averaged by hooks. Teacher targets are refreshed every few steps; while the
teacher runs, the head is parked on the host to leave room for it.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.a = nn.Linear(dim, 2 * dim)
        self.b = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, inputs, dim, depth):
        super().__init__()
        self.inp = nn.Linear(inputs, dim)
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ProbeHead(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.hidden = nn.Linear(dim, dim)
        self.logits = nn.Linear(dim, classes)

    def forward(self, z):
        return self.logits(F.gelu(self.hidden(z)))


def average_gradients(module):
    """Average each gradient over the ranks as soon as it is complete."""
    world = dist.get_world_size()

    def hook(param):
        dist.all_reduce(param.grad)
        param.grad.div_(world)

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(hook)


class Parking:
    """Moves a module's weights to host memory and back, keeping the optimizer attached."""

    def __init__(self, module, optimizer):
        self.module, self.optimizer = module, optimizer
        self.host = {}

    def _slots(self):
        for name, sub in self.module.named_modules():
            for key in sub._parameters:
                yield (name, key), sub

    def park(self):
        for slot, sub in self._slots():
            p = sub._parameters[slot[1]]
            self.host[slot] = (p, p.detach().to("cpu", copy=True))
            sub._parameters[slot[1]] = None

    def unpark(self, device):
        renamed = {}
        for slot, sub in self._slots():
            old, data = self.host.pop(slot)
            new = nn.Parameter(data.to(device))
            sub._parameters[slot[1]] = new
            renamed[old] = new
        for group in self.optimizer.param_groups:
            group["params"] = [renamed.get(p, p) for p in group["params"]]
        for old, new in renamed.items():
            if old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)


class Teacher:
    def __init__(self, inputs, classes, device):
        g = torch.Generator().manual_seed(99)
        self.w1 = (torch.randn(inputs, 64, generator=g) / inputs ** 0.5).to(device)
        self.w2 = (torch.randn(64, classes, generator=g) * 0.6).to(device)

    @torch.no_grad()
    def __call__(self, x):
        return ((x @ self.w1).sin() @ self.w2).softmax(-1)


def points(n, inputs, seed):
    return torch.randn(n, inputs, generator=torch.Generator().manual_seed(seed))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--inputs", type=int, default=10)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--classes", type=int, default=6)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--refresh", type=int, default=16, help="steps per round of teacher targets")
    p.add_argument("--lr", type=float, default=4e-3)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(31)
    encoder = Encoder(args.inputs, args.dim, args.depth).to(device)
    head = ProbeHead(args.dim, args.classes).to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in encoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(encoder, mesh=mesh)
    average_gradients(head)

    optimizer = torch.optim.AdamW(
        [{"params": list(encoder.parameters())}, {"params": list(head.parameters()), "lr": 2 * args.lr}],
        lr=args.lr,
        weight_decay=0.0,
    )
    parking = Parking(head, optimizer)
    teacher = Teacher(args.inputs, args.classes, device)

    def soft_loss(x, target):
        return F.kl_div(head(encoder(x)).log_softmax(-1), target, reduction="batchmean")

    round_data = []
    for step in range(args.steps):
        if step % args.refresh == 0:
            if step:
                parking.park()
            round_data = []
            for i in range(args.refresh):
                x = points(args.batch, args.inputs, 10_000 + step + i)[rank::world].to(device)
                round_data.append((x, teacher(x)))
            if step:
                parking.unpark(device)
                average_gradients(head)

        x, target = round_data[step % args.refresh]
        loss = soft_loss(x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        if (step + 1) % 8 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:3d}  kl {shown.item() / world:.6f}", flush=True)

    with torch.no_grad():
        x = points(128, args.inputs, 1)[rank::world].to(device)
        target = teacher(x)
        agree = (head(encoder(x)).argmax(-1) == target.argmax(-1)).float().mean()
        stats = torch.stack([soft_loss(x, target), agree])
    dist.all_reduce(stats)
    norm = sum(q.detach().square().sum() for q in head.parameters()).sqrt()
    if rank == 0:
        print(f"held-out kl {stats[0].item() / world:.6f} agreement {stats[1].item() / world:.4f} |head| {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
