#!/usr/bin/env python
"""CLIP-style two-tower contrastive training, sharded with FSDP2.

    torchrun --nproc-per-node 2 clip_train.py --steps 5 --batch-size 16
    torchrun --nproc-per-node 2 clip_train.py --steps 5 --save-freq 3 --ckpt-dir runs/a
    torchrun --nproc-per-node 2 clip_train.py --steps 5 --resume runs/a

--batch-size is the global batch. Negatives are those of the whole global batch.

args: --steps 5
save_args: --save-freq 3 --ckpt-dir {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
import copy
import logging
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger("clip")


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--samples", type=int, default=64)
    p.add_argument("--width", type=int, default=48)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--embed-dim", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--wd", type=float, default=0.05)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--total-steps", type=int, default=50, help="horizon of the schedule")
    p.add_argument("--grad-clip", type=float, default=1.0)
    p.add_argument("--ema-decay", type=float, default=0.9)
    p.add_argument("--eval-freq", type=int, default=2)
    p.add_argument("--save-freq", type=int, default=0)
    p.add_argument("--ckpt-dir", type=str, default="runs/clip")
    p.add_argument("--resume", type=str, default=None)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


# ----------------------------------------------------------------- data
class PairedShapes(Dataset):
    """An image is a blob whose place and colour are named by its caption."""

    vocab, text_len, size = 40, 8, 16

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        x, y, c, r = (int(torch.randint(0, k, (1,), generator=g)) for k in (8, 8, 3, 4))
        image = 0.1 * torch.randn(3, self.size, self.size, generator=g)
        image[c, 2 * y : 2 * y + r + 1, 2 * x : 2 * x + r + 1] += 2.0
        noise = torch.randint(30, 39, (3,), generator=g).tolist()
        text = torch.tensor([1, 2 + x, 10 + y, 18 + c, 22 + r, *noise])
        text[-1] = self.vocab - 1  # end of text
        return image, text


# ----------------------------------------------------------------- model
class ResidualBlock(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.ln_2(x))


class VisionTower(nn.Module):
    def __init__(self, width, layers, heads, out, patch=4, size=16):
        super().__init__()
        self.conv = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(ResidualBlock(width, heads, causal=False) for _ in range(layers))
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Linear(width, out, bias=False)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.proj(self.ln_post(x[:, 0]))


class TextTower(nn.Module):
    def __init__(self, width, layers, heads, out, vocab, length):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Parameter(torch.randn(length, width) * 0.01)
        self.blocks = nn.ModuleList(ResidualBlock(width, heads, causal=True) for _ in range(layers))
        self.ln_final = nn.LayerNorm(width)
        self.proj = nn.Linear(width, out, bias=False)

    def forward(self, t):
        x = self.tok(t) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.proj(self.ln_final(x[torch.arange(len(t)), t.argmax(-1)]))


class CLIP(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.visual = VisionTower(a.width, a.layers, a.heads, a.embed_dim)
        self.text = TextTower(a.width, a.layers, a.heads, a.embed_dim, PairedShapes.vocab, PairedShapes.text_len)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))  # 1-d: fully_shard takes no scalars

    def forward(self, image, text):
        return F.normalize(self.visual(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def shard(model):
    for tower in (model.visual, model.text):
        for blk in tower.blocks:
            fully_shard(blk)
        fully_shard(tower)
    return fully_shard(model, reshard_after_forward=True)


# ----------------------------------------------------------------- loss
class ClipLoss(nn.Module):
    """InfoNCE over the global batch: local rows against the features of all ranks, with the gradient through the gather."""

    def forward(self, img, txt, scale):
        rank, n = dist.get_rank(), img.size(0)
        all_img = torch.cat(torch.distributed.nn.all_gather(img), dim=0)
        all_txt = torch.cat(torch.distributed.nn.all_gather(txt), dim=0)
        target = torch.arange(n, device=img.device) + rank * n
        return 0.5 * (
            F.cross_entropy(scale * img @ all_txt.T, target) + F.cross_entropy(scale * txt @ all_img.T, target)
        )


# ----------------------------------------------------------------- train
@torch.no_grad()
def update_ema(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters(), strict=True):
        e.lerp_(p, 1 - decay)


@torch.no_grad()
def evaluate(model, loader):
    """Image to text retrieval on the held-out set."""
    model.eval()
    imgs, txts = [], []
    for image, text in loader:
        i, t, _ = model(image, text)
        imgs.append(i), txts.append(t)
    i, t = torch.cat(imgs), torch.cat(txts)
    world = dist.get_world_size()
    gi, gt = [torch.empty_like(i) for _ in range(world)], [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(gi, i)
    dist.all_gather(gt, t)
    i, t = torch.cat(gi), torch.cat(gt)
    model.train()
    return ((i @ t.T).argmax(1) == torch.arange(len(i))).float().mean().item()


def checkpoint_state(model, ema, optim):
    return {
        "model": get_model_state_dict(model),
        "ema": get_model_state_dict(ema),
        "optim": get_optimizer_state_dict(model, optim),
    }


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    assert args.batch_size % world == 0

    model = CLIP(args)
    ema = copy.deepcopy(model).requires_grad_(False)
    shard(model), shard(ema)
    decay, plain = [], []
    for name, p in model.named_parameters():
        (plain if p.ndim < 2 or "pos" in name or "cls" in name else decay).append(p)
    optim = torch.optim.AdamW(
        [{"params": decay, "weight_decay": args.wd}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        eps=1e-6,
    )

    def lr_lambda(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        t = (step - args.warmup) / max(1, args.total_steps - args.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, t)))

    sched = torch.optim.lr_scheduler.LambdaLR(optim, lr_lambda)

    train_set, val_set = PairedShapes(args.samples, seed=1), PairedShapes(32, seed=2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=8, sampler=DistributedSampler(val_set, world, rank, shuffle=False))

    step = 0
    if args.resume:
        state = {**checkpoint_state(model, ema, optim), "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, "last"))
        set_model_state_dict(model, state["model"])
        set_model_state_dict(ema, state["ema"])
        set_optimizer_state_dict(model, optim, state["optim"])
        sched.load_state_dict(state["sched"])
        step = state["step"]
        logger.info("resumed from %s at step %d", args.resume, step)

    criterion, per_epoch = ClipLoss(), len(loader)
    while step < args.steps:
        epoch, skip = divmod(step, per_epoch)
        sampler.set_epoch(epoch)
        for i, (image, text) in enumerate(loader):
            if i < skip:
                continue
            if step >= args.steps:
                break
            loss = criterion(*model(image, text))
            optim.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optim.step()
            sched.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            update_ema(ema, model, args.ema_decay)
            step += 1

            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            norm = norm.full_tensor().item()
            scale = model.logit_scale.full_tensor().exp().item()
            logger.info(
                "step %d epoch %d loss %.6f norm %.5f scale %.4f lr %.2e",
                step,
                epoch,
                mean_loss.item() / world,
                norm,
                scale,
                sched.get_last_lr()[0],
            )
            if step % args.eval_freq == 0:
                logger.info(
                    "step %d retrieval@1 model %.4f ema %.4f",
                    step,
                    evaluate(model, val_loader),
                    evaluate(ema, val_loader),
                )
            if args.save_freq and step % args.save_freq == 0:
                state = {**checkpoint_state(model, ema, optim), "sched": sched.state_dict(), "step": step}
                dcp.save(state, checkpoint_id=os.path.join(args.ckpt_dir, "last"))
                logger.info("saved at step %d", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
