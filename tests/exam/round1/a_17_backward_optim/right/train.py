"""Optimizer in the backward: every parameter is updated by a hook as soon as its reduced gradient is there, and the gradient
is freed at once. No loop over the parameters, no zero_grad, no global clipping (each parameter's update is clipped by its own RMS).

    torchrun --standalone --nproc-per-node 2 train.py --save-every 5 --out ckpt
"""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

VOCAB, T = 27, 16


class Block(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(T, d)
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


class FusedAdam:
    """Adam with update clipping (as in Adafactor), hooked into the backward."""

    def __init__(self, model, lr, betas=(0.9, 0.95), eps=1e-7, max_rms=1.5, wd=0.01):
        self.lr, self.betas, self.eps, self.max_rms, self.wd, self.t = lr, betas, eps, max_rms, wd, 1
        self.named = dict(model.named_parameters())
        self.state = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in self.named.items()}
        self.done = 0
        for n, p in self.named.items():
            p.register_post_accumulate_grad_hook(self.hook(n))

    def hook(self, name):
        @torch.no_grad()
        def update(p):
            m, v = self.state[name]
            b1, b2 = self.betas
            g = p.grad
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            u = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
            rms = u.square().mean()  # over all shards of this parameter
            rms = rms.full_tensor().sqrt().item()
            p.mul_(1 - self.lr * self.wd if p.ndim > 1 else 1.0)
            p.add_(u, alpha=-self.lr / max(1.0, rms / self.max_rms))
            p.grad = None
            self.done += 1

        return update

    def finish_step(self):
        assert self.done == len(self.named), "a parameter got no gradient in this step"
        self.t, self.done = self.t + 1, 0

    def full_state(self):
        return {n: [t.full_tensor().clone() for t in pair] for n, pair in self.state.items()}

    def load_full_state(self, full):
        for n, pair in full.items():
            for mine, t in zip(self.state[n], pair):
                mine.copy_(scatter_like(t, mine))


def scatter_like(full, like: DTensor):
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def save(out, step, model, fused):
    """One file, independent of the number of ranks."""
    weights = {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()}
    state = fused.full_state()
    if dist.get_rank() == 0:
        os.makedirs(out, exist_ok=True)
        path = os.path.join(out, f"lm-{step:06d}.pt")
        torch.save({"weights": weights, "adam": state, "t": fused.t, "step": step}, path + "~")
        os.replace(path + "~", path)
    dist.barrier()


def load(folder, model, fused):
    ck = torch.load(max(glob.glob(os.path.join(folder, "lm-*.pt"))), weights_only=True)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(scatter_like(ck["weights"][n], p))
    fused.load_full_state(ck["adam"])
    fused.t = ck["t"]
    return ck["step"]


def rows(step, n):
    g = torch.Generator().manual_seed(5000 + step)
    r = torch.randint(0, 9, (n, T + 1), generator=g)
    for t in range(2, T + 1):
        r[:, t] = (2 * r[:, t - 1] + r[:, t - 2] + 1) % VOCAB
    return r


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(12)
    model = LM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    fused = FusedAdam(model, args.lr)
    start = load(args.resume, model, fused) if args.resume else 0

    for step in range(start, args.steps):
        fused.lr = args.lr * min((step + 1) / 5, 1.0 - 0.8 * step / args.steps)
        mine = rows(step, args.batch).chunk(world)[rank]
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()  # the update happens in here
        fused.finish_step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item():.4f} lr {fused.lr:.2e}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, fused)

    if args.export:
        full = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
