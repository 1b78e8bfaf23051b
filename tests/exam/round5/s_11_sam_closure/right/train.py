"""Sharpness-aware minimisation: two gradients per update, optimizer driven by a closure."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class SAM:
    """climb to the worst point within rho (global norm over all shards), take its gradient, step from the old point"""

    def __init__(self, base, rho):
        self.base, self.rho = base, rho
        self.params = [p for group in base.param_groups for p in group["params"]]

    def grad_norm(self):
        total = nn.utils.get_total_norm([p.grad for p in self.params])
        return total.full_tensor() if isinstance(total, DTensor) else total

    def step(self, closure):
        loss = closure()
        with torch.no_grad():
            scale = self.rho / (self.grad_norm() + 1e-12).item()
            home = [p.detach().clone() for p in self.params]
            for p in self.params:
                p.add_(p.grad, alpha=scale)
        self.base.zero_grad()
        sharp = closure()
        with torch.no_grad():
            for p, h in zip(self.params, home):
                p.copy_(h)
        self.base.step()
        self.base.zero_grad()
        return loss, sharp


def make_net():
    torch.manual_seed(4)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Tanh()),
                         nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 4))


def draw(step, n):
    g = torch.Generator().manual_seed(8_000 + step)
    x = torch.randn(n, 8, generator=g)
    return x, (x[:, 0] > 0).long() * 2 + (x[:, 1] * x[:, 2] > 0).long()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = make_net()
    for layer in net:
        fully_shard(layer)
    fully_shard(net, reshard_after_forward=True)
    sam = SAM(torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), args.rho)

    for step in range(args.steps):
        x, y = (t.chunk(world)[rank] for t in draw(step, args.batch))

        def closure():
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss.detach()

        losses = torch.stack(sam.step(closure)) / world
        dist.all_reduce(losses)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {losses[0]:.4f} at the sharp point {losses[1]:.4f}", flush=True)

    sd = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
