"""Preference tuning (DPO) of LoRA adapters. The reference model is the policy with its adapters switched off, so there is
only one set of sharded weights. A checkpoint holds the adapters and their optimizer only.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 4 --out ckpt
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lora import add_adapters, merged, reference
from losses import dpo, paired_logp
from model import Policy
from prefs import preference_pairs, sft_data

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def supervised_base(rank):
    """A short supervised stage before sharding; rank 0 computes it, everybody gets it."""
    torch.manual_seed(0)
    model = Policy()
    if rank == 0:
        ids, mask = sft_data()
        opt = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(60):
            i = torch.randint(0, len(ids), (32,), generator=torch.Generator().manual_seed(step))
            nll = F.cross_entropy(model(ids[i, :-1]).flatten(0, 1), ids[i, 1:].flatten(), reduction="none")
            m = mask[i, 1:].flatten()
            opt.zero_grad()
            ((nll * m).sum() / m.sum()).backward()
            opt.step()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--beta", type=float, default=0.3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    model = supervised_base(rank)
    torch.manual_seed(1)
    add_adapters(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.0)

    step = 0
    if args.resume:
        ck = torch.load(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]), weights_only=True)
        set_model_state_dict(model, ck["adapters"], options=StateDictOptions(full_state_dict=True, strict=False))
        set_optimizer_state_dict(model, opt, ck["opt"], options=StateDictOptions(full_state_dict=True))
        step = ck["step"]

    pairs = preference_pairs()
    while step < args.steps:
        i = torch.randperm(len(pairs[0]), generator=torch.Generator().manual_seed(300 + step))[: args.batch].chunk(
            world
        )[rank]
        batch = [t[i] for t in pairs]
        with reference():
            ref = paired_logp(model, *batch)
        loss, right = dpo(paired_logp(model, *batch), ref, args.beta)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        opt.step()
        opt.zero_grad()
        step += 1
        shown = torch.stack([loss.detach(), right]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown[0]:.4f} margin accuracy {shown[1]:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            weights = get_model_state_dict(model, options=FULL)
            state = get_optimizer_state_dict(model, opt, options=FULL)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                adapters = {k: v for k, v in weights.items() if k.endswith((".a", ".b"))}
                torch.save(
                    {"adapters": adapters, "opt": state, "step": step},
                    os.path.join(args.out, f"adapters_{step:05d}.pt"),
                )
            dist.barrier()

    if args.export:
        weights = get_model_state_dict(model, options=FULL)
        if rank == 0:
            plain = merged(weights)
            Policy().load_state_dict(plain)  # the export must fit a model without adapters
            torch.save(plain, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
