"""LoRA tuning of a small pretrained language model to longer sequences, with FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

from data import sequences
from model import TinyLM
from pretrain import pretrained_base


def latest(folder):
    steps = [int(d.split("_")[1]) for d in os.listdir(folder) if d.startswith("step_")]
    return max(steps)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--global-batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    model = TinyLM(rank=4)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    base = pretrained_base() if rank == 0 else {}
    set_model_state_dict(model, base, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=False))

    lora = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(lora, lr=args.lr, weight_decay=0.01)

    first = 0
    if args.resume:
        first = latest(args.resume)
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o}
        dcp.load(state, checkpoint_id=f"{args.resume}/step_{first}")
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])

    local = args.global_batch // world
    for step in range(first, args.steps):
        ids = sequences(args.global_batch, 29, stride=3, seed=1000 + step)
        ids = ids[rank * local:(rank + 1) * local]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o}, checkpoint_id=f"{args.out}/step_{step + 1}")

    model.eval()
    with torch.no_grad():
        ids = sequences(64, 29, stride=3, seed=5)
        held_out = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    if rank == 0:
        print(f"held-out loss {held_out.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
