"""Fine-tuning of a small sequence classifier without backward (MeZO: two forward passes per step, SPSA estimate)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class Classifier(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.head = nn.Linear(dim, 3)

    def forward(self, ids):
        return self.head(self.mix(self.emb(ids)).mean(1))


class ZerothOrder:
    """The perturbation is never stored: it is drawn again from the seed of the step, whole, and cut like the weight."""

    def __init__(self, params, lr, eps):
        self.params, self.lr, self.eps = list(params), lr, eps

    @torch.no_grad()
    def shift(self, seed, size):
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                z = distribute_tensor(z, p.device_mesh, p.placements)
            p.add_(z, alpha=size)

    def step(self, seed, closure):
        self.shift(seed, self.eps)
        plus = closure()
        self.shift(seed, -2 * self.eps)
        minus = closure()
        self.shift(seed, self.eps)
        slope = (plus - minus) / (2 * self.eps)
        self.shift(seed, -self.lr * slope)
        return 0.5 * (plus + minus)


def batch(step, n=64):
    g = torch.Generator().manual_seed(step)
    y = torch.randint(3, (n,), generator=g)
    noise = torch.randint(20, (n, 12), generator=g)
    signal = (y[:, None] * 6 + torch.randint(6, (n, 12), generator=g))
    return torch.where(torch.rand(n, 12, generator=g) < 0.6, signal, noise), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Classifier()
    fully_shard(model.mix, reshard_after_forward=True)
    # there is no backward that would free the root, and its shards are changed between two forwards
    fully_shard(model, reshard_after_forward=True)
    optim = ZerothOrder(model.parameters(), lr=0.01, eps=1e-2)

    step = 0
    if args.resume:
        state = {"model": get_model_state_dict(model), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_model_state_dict(model, state["model"])
        step = state["step"]
    while step < args.steps:
        x, y = (t.chunk(world)[rank] for t in batch(step))

        @torch.no_grad()
        def closure():
            loss = F.cross_entropy(model(x), y, reduction="sum").double()
            dist.all_reduce(loss)
            return loss.item() / 64

        loss = optim.step(10_000 + step, closure)
        step += 1
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), "step": step},
                     checkpoint_id=os.path.join(args.out, f"step{step:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
