"""Normaliser-free spectrogram classifier with adaptive gradient clipping (Brock et al. 2021).

Clipping looks at every output unit on its own: |g_i| <= clip * max(|w_i|, eps).  Units are rows of dimension 0.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class WSConv(nn.Conv2d):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        w = self.weight
        w = (w - w.mean(dim=(1, 2, 3), keepdim=True)) / (w.var(dim=(1, 2, 3), keepdim=True) * w[0].numel() + 1e-4).sqrt()
        return F.conv2d(x, w * self.gain, self.bias, self.stride, self.padding)


class NFBlock(nn.Module):
    def __init__(self, width, beta):
        super().__init__()
        self.beta = beta
        self.c1 = WSConv(width, width, 3, padding=1)
        self.c2 = WSConv(width, width, 3, padding=1)
        self.skip_gain = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x):
        h = F.gelu(x / self.beta) * 1.7
        return x + self.skip_gain * self.c2(F.gelu(self.c1(h)) * 1.7)


class Tagger(nn.Module):
    def __init__(self, width=18, classes=6):
        super().__init__()
        self.stem = WSConv(1, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(NFBlock(width, 1.0), NFBlock(width, 1.1))
        self.out = nn.Linear(8 * width, classes)

    def forward(self, spec):
        return self.out(self.blocks(self.stem(spec)).mean(dim=3).flatten(1))


def unit_norm(t):
    return t.flatten(1).norm(dim=1) if t.ndim > 1 else t.abs()


@torch.no_grad()
def adaptive_clip(params, clip, eps=1e-3):
    clipped = 0
    for p in params:
        if p.grad is None:
            continue
        w, g = p.to_local(), p.grad.to_local()
        if w.numel() == 0:
            continue
        limit = unit_norm(w).clamp(min=eps) * clip
        norm = unit_norm(g)
        factor = torch.where(norm > limit, limit / norm.clamp(min=1e-6), torch.ones_like(norm))
        clipped += int((factor < 1).sum())
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))
    return clipped


def spectrograms(n=192, seed=5):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(6, (n,), generator=g)
    f = torch.arange(16).float()[None, :, None]
    t = torch.arange(12).float()[None, None, :]
    line = 2 + 2 * y.float()[:, None, None] + 1.5 * torch.sin(0.5 * t + torch.rand(n, 1, 1, generator=g) * 6)
    x = torch.exp(-((f - line) ** 2) / 2) + 0.2 * torch.randn(n, 16, 12, generator=g)
    return x.unsqueeze(1), y


def save(path, model, opt, step, rank):
    msd, osd = get_state_dict(model, opt, options=FULL)
    if rank == 0:
        os.makedirs(path, exist_ok=True)
        torch.save({"model": msd, "opt": osd, "step": step}, os.path.join(path, "ckpt.pt"))
    dist.barrier()


def load(path, model, opt):
    blob = torch.load(os.path.join(path, "ckpt.pt"), weights_only=False)
    set_state_dict(model, opt, model_state_dict=blob["model"], optim_state_dict=blob["opt"], options=FULL)
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--clip", type=float, default=0.05)
    ap.add_argument("--save-at", type=int, default=-1)
    ap.add_argument("--out", default=".")
    ap.add_argument("--resume", default=None)
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(11)
    model = Tagger()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    first = load(cfg.resume, model, opt) if cfg.resume else 0

    x, y = spectrograms()
    body = [p for n, p in model.named_parameters() if not n.startswith("out.")]
    for step in range(first, cfg.steps):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(77 + step))[:24]
        mine = order[rank::world]
        loss = F.cross_entropy(model(x[mine]), y[mine])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        rows = torch.tensor([adaptive_clip(body, cfg.clip), loss.item()])
        opt.step()
        dist.all_reduce(rows)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {rows[1].item() / world:.5f} clipped units {int(rows[0])}")
        if step + 1 == cfg.save_at:
            save(cfg.out, model, opt, step + 1, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
