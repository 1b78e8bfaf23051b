import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import ckpt
from data import CTX, VOCAB, local_batch
from guard import SpikeGuard
from model import TinyLM


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--rows", type=int, default=8, help="global batch in packed rows")
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="out")
    p.add_argument("--resume", default=None)
    return p.parse_args()


def main():
    a = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert a.rows % world == 0
    torch.manual_seed(a.seed)
    model = TinyLM(VOCAB, ctx=CTX + 2)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=a.lr, betas=(0.9, 0.95))
    guard = SpikeGuard()
    start = 0
    if a.resume:
        extra = ckpt.load(a.resume, model, opt)
        start = extra["step"]
        guard.load_state_dict(extra["guard"])

    for step in range(start, a.steps):
        tokens, pos, ids = local_batch(step, a.rows, a.seed, rank, world)
        logits = model(tokens[:, :-1], pos[:, :-1], ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        gnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        shown /= world
        skip = guard.spike(shown.item())
        if not skip:
            opt.step()
        opt.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {shown.item():.4f} gnorm {gnorm.full_tensor().item() if hasattr(gnorm, 'full_tensor') else gnorm.item():.3f}{' skipped' if skip else ''}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            ckpt.save(a.out, step + 1, model, opt, {"guard": guard.state_dict()})
    if rank == 0:
        print(f"done, {guard.skipped} updates skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
