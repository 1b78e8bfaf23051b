"""Prompt tuning of several classification tasks at once on a sharded, frozen language model."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from backbone import Backbone
from prompts import PromptBank, PromptedModel, average_gradients

VOCAB, SEQ, TASKS, CLASSES = 40, 10, 3, 4


def examples(step, batch):
    """Task t asks in which quarter of the vocabulary most words lie after a shift of t."""
    g = torch.Generator().manual_seed(900 + step)
    task = torch.randint(TASKS, (batch,), generator=g)
    label = torch.randint(CLASSES, (batch,), generator=g)
    inside = ((label + task) % CLASSES)[:, None] * (VOCAB // CLASSES) + torch.randint(VOCAB // CLASSES, (batch, SEQ), generator=g)
    other = torch.randint(VOCAB, (batch, SEQ), generator=g)
    ids = torch.where(torch.rand(batch, SEQ, generator=g) < 0.7, inside, other)
    return ids, task, label


def build(args):
    torch.manual_seed(args.seed)
    backbone = Backbone(VOCAB, args.dim)
    backbone.requires_grad_(False)
    bank = PromptBank(TASKS, args.prompt_len, args.dim, CLASSES)
    model = PromptedModel(backbone, bank)
    for layer in backbone.layers:
        fully_shard(layer)
    # the bank is tiny: each rank keeps all of it
    fully_shard(model, ignored_params=set(bank.parameters()))
    return model, bank


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--dim", type=int, default=32)
    ap.add_argument("--prompt-len", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-2)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--out", default="")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, bank = build(args)
    params = list(bank.parameters())
    opt = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, args.steps)

    begin = 0
    if args.resume and os.path.exists(os.path.join(args.resume, "prompts.pt")):
        blob = torch.load(os.path.join(args.resume, "prompts.pt"))
        bank.load_state_dict(blob["bank"])
        opt.load_state_dict(blob["opt"])
        sched.load_state_dict(blob["sched"])
        begin = blob["step"]

    n = args.batch // world
    for step in range(begin, args.steps):
        ids, task, label = (t[rank * n:(rank + 1) * n] for t in examples(step, args.batch))
        loss = F.cross_entropy(model(ids, task), label)
        opt.zero_grad()
        loss.backward()
        average_gradients(params)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        sched.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (step == 0 or step % 5 == 4):
            print(f"step {step + 1}: loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and args.out and (step + 1) % args.save_every == 0:
            # the backbone is not part of the file: it is built from its seed
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"bank": bank.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "step": step + 1},
                           os.path.join(args.out, "prompts.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
