"""Two-tower contrastive training (CLIP loss over the global batch)."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Tower(nn.Module):
    def __init__(self, d_in, width=32, dim=16):
        super().__init__()
        self.inp = nn.Linear(d_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )
        self.proj = nn.Linear(width, dim, bias=False)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return F.normalize(self.proj(h), dim=-1)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Tower(36)
        self.text = Tower(20)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, img, txt):
        return self.image(img), self.text(txt), self.logit_scale.exp()


def clip_loss(zi, zt, scale, rank):
    all_i, all_t = torch.cat(dist_fn.all_gather(zi)), torch.cat(dist_fn.all_gather(zt))
    target = torch.arange(len(zi)) + rank * len(zi)
    return 0.5 * (F.cross_entropy(scale * zi @ all_t.T, target) + F.cross_entropy(scale * zt @ all_i.T, target))


def pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    latent = torch.randn(n, 6, generator=g)
    wg = torch.Generator().manual_seed(123)
    img = torch.tanh(latent @ torch.randn(6, 36, generator=wg)) + 0.3 * torch.randn(n, 36, generator=g)
    txt = torch.tanh(latent @ torch.randn(6, 20, generator=wg)) + 0.3 * torch.randn(n, 20, generator=g)
    return img, txt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="clip")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    model = CLIP()
    for tower in (model.image, model.text):
        for b in tower.blocks:
            fully_shard(b)
        fully_shard(tower)
    # fully_shard does not take 0-d parameters, the temperature stays a plain tensor
    fully_shard(model, ignored_params={model.logit_scale})
    towers = [p for n, p in model.named_parameters() if n != "logit_scale"]
    opt = torch.optim.AdamW(
        [{"params": towers, "weight_decay": 0.1}, {"params": [model.logit_scale], "weight_decay": 0.0, "lr": 2e-2}],
        lr=3e-3,
    )
    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda f: int(f.split("-")[1].split(".")[0]))
        ck = torch.load(os.path.join(args.resume, newest), weights_only=False)
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"], options=opts)
        step = ck["step"]

    img, txt = pairs(2048, 1)
    while step < args.steps:
        idx = torch.randperm(len(img), generator=torch.Generator().manual_seed(step))[: args.batch].chunk(world)[rank]
        zi, zt, scale = model(img[idx], txt[idx])
        loss = clip_loss(zi, zt, scale, rank)
        opt.zero_grad()
        loss.backward()
        dist.all_reduce(model.logit_scale.grad)
        model.logit_scale.grad /= world
        opt.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        step += 1
        if rank == 0 and step % 2 == 0:
            print(
                f"step {step} loss {loss.item():.4f} temperature {1 / model.logit_scale.exp().item():.4f}", flush=True
            )
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt, options=opts)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": m, "opt": o, "step": step}, os.path.join(args.out, f"clip-{step}.pt"))
            dist.barrier()

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
