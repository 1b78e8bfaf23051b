"""Pre-training of a small causal LM over several epochs with gradient accumulation."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import ckpt
from data import EpochLoader, build_corpus, groups
from model import CausalLM


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--micro-batch", type=int, default=8, help="sequences of all ranks together")
    p.add_argument("--rows", type=int, default=80)
    p.add_argument("--vocab", type=int, default=48)
    p.add_argument("--ctx", type=int, default=24)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--out", default=None)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default=None)
    return p.parse_args()


def lr_at(step, a):
    warm = min(1.0, (step + 1) / 4)
    return a.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / a.steps))


def update(model, opt, group, a):
    """One optimizer step over the micro-batches of a group; returns the mean loss of this rank."""
    total = 0.0
    for i, rows in enumerate(group):
        # one reduce-scatter a step: the earlier micro-batches only add up
        model.set_requires_gradient_sync(i == len(group) - 1)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / len(group)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    return total


def main():
    a = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = CausalLM(a.vocab, ctx=a.ctx)
    for blk in model.blocks:
        fully_shard(blk)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.05, betas=(0.9, 0.98))
    loader = EpochLoader(build_corpus(a.vocab, a.rows, a.ctx), a.micro_batch, rank, world)
    per_epoch = math.ceil(len(loader) / a.accum)

    step = ckpt.load_latest(a.resume, model, opt) if a.resume else 0
    while step < a.steps:
        epoch, done = divmod(step, per_epoch)
        for k, group in enumerate(groups(loader.epoch(epoch), a.accum)):
            if k < done or step >= a.steps:
                continue
            for pg in opt.param_groups:
                pg["lr"] = lr_at(step, a)
            loss = torch.tensor(update(model, opt, group, a))
            dist.all_reduce(loss)
            step += 1
            if rank == 0 and (step % 3 == 0 or step == 1):
                print(f"epoch {epoch} step {step} loss {loss.item() / world:.4f}", flush=True)
            if a.out and a.save_every and step % a.save_every == 0:
                ckpt.save(a.out, model, opt, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
