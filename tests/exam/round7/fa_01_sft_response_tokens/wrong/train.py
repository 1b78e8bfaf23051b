"""Supervised fine-tuning of a small causal LM on responses only, with gradient accumulation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import IGNORE, GlobalBatches, SFTDataset
from model import CausalLM


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--micro-batches", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    return p.parse_args()


def newest(folder):
    steps = [int(n.split("-")[1]) for n in os.listdir(folder) if n.startswith("step-")]
    return os.path.join(folder, f"step-{max(steps)}") if steps else None


def save(model, optimizer, scheduler, step, folder):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "sched": scheduler.state_dict(), "step": step}
    dcp.save(state, checkpoint_id=os.path.join(folder, f"step-{step}"))


def load(model, optimizer, scheduler, path):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "sched": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["sched"])
    return state["step"]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    dataset = SFTDataset(size=256, vocab=24, max_prompt=10, seed=11)
    batches = GlobalBatches(dataset, args.global_batch, args.micro_batches, rank, world, seed=100)

    model = CausalLM(vocab=24, dim=32, depth=2, heads=4, max_len=32)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))

    start = load(model, optimizer, scheduler, newest(args.resume)) if args.resume else 0

    for step in range(start, args.steps):
        micro = batches.step(step)
        n_tokens = sum((labels[:, 1:] != IGNORE).sum() for _, labels in micro)
        loss_sum = torch.zeros(())
        for i, (tokens, labels) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            logits = model(tokens)[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")
            # gradients are averaged over the ranks, the loss is a mean over all response tokens
            (loss / n_tokens).backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        dist.all_reduce(loss_sum)
        dist.all_reduce(n_tokens)
        if rank == 0 and (step % 5 == 4 or step == args.steps - 1):
            print(f"step {step + 1} loss {loss_sum.item() / n_tokens.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save(model, optimizer, scheduler, step + 1, args.out)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
