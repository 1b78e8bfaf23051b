"""FSDP2 with an in-house Lion optimizer that keeps its momenta as plain tensors next to the shards."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = p.to_local(), p.grad.to_local()
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(g)
                m = state["exp_avg"]
                w.mul_(1 - group["lr"] * group["weight_decay"])
                update = m.mul(b1).add(g, alpha=1 - b1)
                w.sub_(update.div(update.abs().add(1e-3)), alpha=group["lr"])
                m.mul_(b2).add_(g, alpha=1 - b2)


class Classifier(nn.Module):
    def __init__(self, vocab=64, dim=32, classes=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, classes)

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.out(x)


class CheckpointManager:
    def __init__(self, root, model, opt):
        self.root, self.model, self.opt = root, model, opt
        self.rank = dist.get_rank()

    def save(self, step):
        path = os.path.join(self.root, f"ckpt_{step:06d}")
        dcp.save({"model": get_model_state_dict(self.model)}, checkpoint_id=path)
        torch.save({"optim": self.opt.state_dict(), "step": step}, os.path.join(path, f"optim_{self.rank}.pt"))
        dist.barrier()

    def restore(self):
        newest = sorted(d for d in os.listdir(self.root) if d.startswith("ckpt_"))[-1]
        path = os.path.join(self.root, newest)
        state = {"model": get_model_state_dict(self.model)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        extra = torch.load(os.path.join(path, f"optim_{self.rank}.pt"))
        self.opt.load_state_dict(extra["optim"])
        return extra["step"]


def make_batch(step, batch, rank, world):
    g = torch.Generator().manual_seed(50_000 + step)
    tokens = torch.randint(64, (batch, 10), generator=g)
    votes = F.one_hot(tokens % 8, 8).sum(1) + 0.1 * F.one_hot(tokens[:, 0] % 8, 8)
    labels = votes.argmax(1)
    return tokens[rank::world], labels[rank::world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Classifier()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = Lion(model.parameters(), lr=1.5e-2, weight_decay=0.01)

    start = CheckpointManager(args.resume, model, opt).restore() if args.resume else 0
    manager = CheckpointManager(args.out, model, opt) if args.out and args.save_every else None

    for step in range(start, args.steps):
        tokens, labels = make_batch(step, args.batch, rank, world)
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if manager and (step + 1) % args.save_every == 0:
            manager.save(step + 1)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"{step + 1:4d}  loss {mean.item() / world:.4f}", flush=True)

    if args.export:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
