"""Energy calibration of particle jets with a mixture of expert MLPs.

Experts are spread over the ranks; an event's features travel to the rank of its expert
and back. Everything else is sharded by FSDP2. Validation uses every event once.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES = 12


class SwapRanks(torch.autograd.Function):
    """Chunk i of dim 0 goes to rank i."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx, g):
        y = torch.empty_like(g)
        dist.all_to_all_single(y, g.contiguous())
        return y


class Gate(nn.Module):
    """Picks an expert and a slot there; events beyond an expert's capacity keep their residual."""

    def __init__(self, dim, experts, capacity_factor, min_capacity):
        super().__init__()
        self.experts, self.factor, self.minimum = experts, capacity_factor, min_capacity
        self.score = nn.Linear(dim, experts, bias=False)

    def capacity(self, x):
        events = torch.tensor(x.shape[0], device=x.device)
        dist.all_reduce(events, op=dist.ReduceOp.MAX)
        events = events.item()
        return max(self.minimum, math.ceil(self.factor * events / self.experts))

    def forward(self, x):
        weight, expert = self.score(x).softmax(-1).max(-1)
        onehot = F.one_hot(expert, self.experts)
        slot = (onehot.cumsum(0) * onehot).sum(-1) - 1
        capacity = self.capacity(x)
        kept = slot < capacity
        address = expert * capacity + slot.clamp(max=capacity - 1)
        return address, weight * kept, kept, capacity


class MoE(nn.Module):
    def __init__(self, args, gen):
        super().__init__()
        rank, self.world = dist.get_rank(), dist.get_world_size()
        self.norm = nn.LayerNorm(args.dim)
        self.gate = Gate(args.dim, args.experts, args.capacity_factor, args.min_capacity)
        w1 = torch.randn(args.experts, args.dim, args.hidden, generator=gen) * args.dim ** -0.5
        w2 = torch.randn(args.experts, args.hidden, args.dim, generator=gen) * args.hidden ** -0.5
        self.expert_w1 = nn.Parameter(w1.chunk(self.world)[rank].clone())
        self.expert_w2 = nn.Parameter(w2.chunk(self.world)[rank].clone())

    def expert_parameters(self):
        return [self.expert_w1, self.expert_w2]

    def forward(self, x):
        h = self.norm(x)
        address, weight, kept, capacity = self.gate(h)
        experts, dim = self.gate.experts, x.shape[-1]
        queue = h.new_zeros(experts * capacity, dim).index_add(0, address, h * kept.unsqueeze(-1))
        queue = SwapRanks.apply(queue).view(self.world, -1, capacity, dim).transpose(0, 1)
        here = queue.reshape(queue.shape[0], -1, dim)
        here = torch.bmm(F.gelu(torch.bmm(here, self.expert_w1)), self.expert_w2)
        back = here.view(-1, self.world, capacity, dim).transpose(0, 1).reshape(-1, dim)
        return x + weight.unsqueeze(-1) * SwapRanks.apply(back)[address]


class Calibrator(nn.Module):
    def __init__(self, args, gen):
        super().__init__()
        self.inp = nn.Linear(FEATURES, args.dim)
        self.layers = nn.ModuleList(MoE(args, gen) for _ in range(args.layers))
        self.out = nn.Sequential(nn.LayerNorm(args.dim), nn.Linear(args.dim, 1))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).squeeze(-1)


def jets(count, seed):
    """The response depends on the detector region, which decides the shape of the correction."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=g)
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    shapes = torch.stack([x[:, 2] * x[:, 3], torch.tanh(2 * x[:, 4]), x[:, 5].abs() - 0.8, x[:, 6] - x[:, 7]], 1)
    y = shapes.gather(1, region.unsqueeze(1)).squeeze(1)
    return x, y + 0.05 * torch.randn(count, generator=g)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--experts", type=int, default=4)
    p.add_argument("--capacity-factor", type=float, default=4.0)
    p.add_argument("--min-capacity", type=int, default=2)
    p.add_argument("--batch", type=int, default=48)
    p.add_argument("--eval-batch", type=int, default=12, help="events of a rank")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--eval-every", type=int, default=15)
    p.add_argument("--lr", type=float, default=6e-3)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(71)
    model = Calibrator(args, torch.Generator().manual_seed(72)).to(device)
    own_experts = {q for layer in model.layers for q in layer.expert_parameters()}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=own_experts)
    fully_shard(model, mesh=mesh, ignored_params=own_experts)

    def mean_gradient(q):
        # the exchange has already added up the ranks
        q.grad.div_(world)

    for q in own_experts:
        q.register_post_accumulate_grad_hook(mean_gradient)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, foreach=False)

    valid_x, valid_y = (t.to(device) for t in jets(59, 5))

    @torch.no_grad()
    def validate():
        model.eval()
        total = torch.zeros((), device=device)
        share = torch.arange(len(valid_y), device=device)[rank::world]
        for part in share.split(args.eval_batch):
            total += (model(valid_x[part]) - valid_y[part]).square().sum()
        dist.all_reduce(total)
        model.train()
        return total.item() / len(valid_y)

    n = args.batch // world
    for step in range(1, args.steps + 1):
        x, y = (t[rank * n:(rank + 1) * n].to(device) for t in jets(args.batch, 1000 + step))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % args.eval_every == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step:3d} loss {shown.item() / world:.5f}", flush=True)
            error = validate()
            if rank == 0:
                print(f"         valid {error:.5f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
