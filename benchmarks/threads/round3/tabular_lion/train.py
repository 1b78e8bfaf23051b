"""Click-through style tabular classifier trained with a compact Lion optimizer.

The optimizer keeps its momentum in bfloat16 and works on the local shard of every
parameter directly.
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

NUM_CAT, CARD, NUM_DENSE = 6, 20, 8


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class CompactLion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = self.new_momentum(p)
                weight, grad, mom = local(p), local(p.grad), local(state["momentum"])
                m = mom.float()
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(torch.tanh((m * b1 + grad * (1 - b1)) * 200), alpha=-group["lr"])
                mom.copy_(m * b2 + grad * (1 - b2))

    @staticmethod
    def new_momentum(p):
        return torch.zeros_like(p, dtype=torch.bfloat16)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum"] = state["momentum"].to(torch.bfloat16)


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.net(x)


class TabularNet(nn.Module):
    def __init__(self, dim=48, depth=3):
        super().__init__()
        self.embed = nn.Embedding(NUM_CAT * CARD, 8)
        self.stem = nn.Linear(NUM_CAT * 8 + NUM_DENSE, dim)
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 2)

    def forward(self, cats, dense):
        x = self.stem(torch.cat([self.embed(cats).flatten(1), dense], dim=1))
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def build_table(rows, seed):
    g = torch.Generator().manual_seed(seed)
    cats = torch.randint(0, CARD, (rows, NUM_CAT), generator=g)
    dense = torch.randn(rows, NUM_DENSE, generator=g)
    effect = torch.randn(NUM_CAT, CARD, generator=g)
    score = sum(effect[c, cats[:, c]] for c in range(NUM_CAT)) + 1.5 * dense[:, 0] * dense[:, 1] + dense[:, 2]
    label = (score > 0).long()
    return cats + torch.arange(NUM_CAT) * CARD, dense, label


def save_checkpoint(path, model, optimizer, step):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    dcp.save({"model": model_sd, "optim": optim_sd, "step": step}, checkpoint_id=path)


def load_checkpoint(path, model, optimizer):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


def parse(argv):
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--save", metavar="DIR")
    ap.add_argument("--save-step", type=int, default=15)
    ap.add_argument("--resume", metavar="DIR")
    return ap.parse_args(argv)


def run(args):
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    model = TabularNet().to(device)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    optimizer = CompactLion(model.parameters(), lr=args.lr, weight_decay=0.01)

    cats, dense, label = (t.to(device) for t in build_table(2048, seed=3))
    step = load_checkpoint(args.resume, model, optimizer) if args.resume else 0
    if args.resume and rank == 0:
        print(f"continuing at step {step}")

    while step < args.steps:
        pick = torch.randint(0, 2048, (args.batch,), generator=torch.Generator().manual_seed(500 + step))
        pick = pick.chunk(world)[rank].to(device)
        loss = nn.functional.cross_entropy(model(cats[pick], dense[pick]), label[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"[{step:03d}] loss={shown.item() / world:.6f}", flush=True)
        if args.save and step == args.save_step:
            save_checkpoint(args.save, model, optimizer, step)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
