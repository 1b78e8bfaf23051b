"""ViT classifier whose AdamW update happens inside backward, one parameter at a time.

Every sharded parameter owns a post-accumulate hook; gradients live only until their hook has run.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


class FusedAdamW:
    def __init__(self, model, lr, betas=(0.9, 0.98), eps=1e-5, wd=0.05):
        self.lr, self.betas, self.eps, self.wd, self.t = lr, betas, eps, wd, 0
        self.lr_now = lr
        self.names = {}
        self.m, self.v = {}, {}
        for name, p in model.named_parameters():
            self.names[p] = name
            self.m[name], self.v[name] = torch.zeros_like(p), torch.zeros_like(p)
            p.register_post_accumulate_grad_hook(self._update)

    def begin(self, total, warmup=4):
        """Call before backward: advances the step and the learning rate."""
        self.t += 1
        self.lr_now = self.lr * min(self.t / warmup, 0.5 * (1 + math.cos(math.pi * self.t / (total + 1))))

    @torch.no_grad()
    def _update(self, p):
        n, (b1, b2) = self.names[p], self.betas
        g, self_m, self_v = p.grad, self.m[n], self.v[n]
        self_m.lerp_(g, 1 - b1)
        self_v.mul_(b2).addcmul_(g, g, value=1 - b2)
        if p.ndim > 1:
            p.mul_(1 - self.lr_now * self.wd)
        denom = (self_v / (1 - b2**self.t)).sqrt().add_(self.eps)
        p.addcdiv_(self_m, denom, value=-self.lr_now / (1 - b1**self.t))
        p.grad = None


class ViT(nn.Module):
    def __init__(self, d=32, depth=3, classes=6):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 4, stride=4)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 10, d))
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.fc = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.fc(self.norm(h[:, 0]))


def samples(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, 6, (n,), generator=g)
    return proto[y] + 0.8 * torch.randn(n, 1, 12, 12, generator=g), y


def state(model, opt):
    return {"model": get_model_state_dict(model), "m": opt.m, "v": opt.v, "t": torch.tensor(opt.t)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="vit")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = ViT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = FusedAdamW(model, lr=4e-3)
    if args.resume:
        st = state(model, opt)
        dcp.load(st, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_model_state_dict(model, st["model"])
        opt.t = int(st["t"])  # the moments were read in place

    x, y = samples(1200, 1)
    vx, vy = samples(240, 2)
    while opt.t < args.steps:
        idx = torch.randint(0, 1200, (args.batch,), generator=torch.Generator().manual_seed(opt.t))[rank::world]
        opt.begin(args.steps)
        loss = F.cross_entropy(model(x[idx]), y[idx])
        loss.backward()
        if opt.t % 5 == 0:
            with torch.no_grad():
                s = torch.stack([(model(vx[rank::world]).argmax(1) == vy[rank::world]).sum().float(), loss.detach()])
            dist.all_reduce(s)
            if rank == 0:
                print(
                    f"step {opt.t} loss {s[1].item() / world:.4f} acc {s[0].item() / 240:.3f} lr {opt.lr_now:.5f}",
                    flush=True,
                )
        if args.save_every and opt.t % args.save_every == 0:
            dcp.save(state(model, opt), checkpoint_id=os.path.join(args.out, f"{opt.t:08d}"))
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
