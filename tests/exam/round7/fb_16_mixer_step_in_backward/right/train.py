"""MLP-Mixer for image regression whose optimizer steps run inside the backward pass: one small optimizer per parameter,
driven by a post-accumulate-grad hook, so that a gradient is freed as soon as it is reduced."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.chan = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chan(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, dim=20, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 2, 2)
        self.blocks = nn.ModuleList([MixerBlock(16, dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 2)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for b in self.blocks:
            x = b(x)
        return self.head(x.mean(1))


def spots(step, n):
    """Image of a spot; the target is its position."""
    g = torch.Generator().manual_seed(step * 3 + 1)
    c = torch.rand(n, 2, generator=g)
    yy, xx = torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij")
    d = (yy - c[:, :1, None]) ** 2 + (xx - c[:, 1:, None]) ** 2
    return (torch.exp(-d / 0.03) + 0.1 * torch.randn(n, 8, 8, generator=g))[:, None], c


class InBackward:
    """AdamW for every parameter on its own, stepped from the hook. The number of calls is checked, so that a
    parameter that is left out or stepped twice does not go unnoticed."""

    def __init__(self, model, lr, weight_decay):
        self.named = dict(model.named_parameters())
        self.optimizers, self.calls = {}, {}
        for name, p in self.named.items():
            decay = weight_decay if p.ndim > 1 else 0.0
            self.optimizers[name] = torch.optim.AdamW([p], lr=lr, weight_decay=decay, foreach=False)
            self.calls[name] = 0
            p.register_post_accumulate_grad_hook(self._hook(name))
        self.lr = lr

    def _hook(self, name):
        def step(p):
            self.optimizers[name].step()
            p.grad = None
            self.calls[name] += 1

        return step

    def set_lr(self, factor):
        for opt in self.optimizers.values():
            opt.param_groups[0]["lr"] = self.lr * factor

    def check(self):
        wrong = [n for n, c in self.calls.items() if c != 1]
        if wrong:
            raise RuntimeError(f"not stepped exactly once: {wrong}")
        self.calls = dict.fromkeys(self.calls, 0)

    def state_dict(self):
        out = {}
        for name, opt in self.optimizers.items():
            p = self.named[name]
            if not opt.state[p]:
                opt.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            out[name] = dict(opt.state[p])
        return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    model = Mixer()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    optim = InBackward(model, args.lr, weight_decay=0.05)

    start = 0
    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))  # in place, as the tensors are the live ones
        start = state["step"]

    for step in range(start, args.steps):
        optim.set_lr(0.1 + 0.9 * (1 - step / args.steps) ** 0.5)
        x, y = (v[rank::world] for v in spots(step, args.batch))
        loss = F.smooth_l1_loss(model(x), y, beta=0.2)
        loss.backward()  # updates the weights as well
        optim.check()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1:3d} loss {loss.item() / world:.6f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step + 1}
            dcp.save(state, checkpoint_id=f"{args.out}/{step + 1:05d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
