"""LoRA fine-tuning of a pretrained language model on a wider language."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lora import add_lora
from model import TinyLM
from pretrain import lm_loss, pretrained_state, sequences

VOCAB, LENGTH, BATCH = 32, 16, 32
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINABLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


def batch(step, rank, world, seed=50):
    ids = sequences(BATCH, LENGTH, VOCAB, (1, 3, 5), torch.Generator().manual_seed(seed + step))
    return ids.chunk(world)[rank]


def load_base(model, rank):
    """Rank 0 reads the pretrained weights; the adapters keep their initial values."""
    state = pretrained_state() if rank == 0 else {}
    set_model_state_dict(model, state, options=LOAD)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = add_lora(TinyLM())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    load_base(model, rank)

    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
    start = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda n: int(n.split("_")[1].split(".")[0]))
        saved = torch.load(os.path.join(args.resume, last), weights_only=False) if rank == 0 else {"adapter": {}, "opt": {}, "step": 0}
        set_model_state_dict(model, saved["adapter"], options=LOAD)
        set_optimizer_state_dict(model, opt, saved["opt"], options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        box = [saved["step"]]
        dist.broadcast_object_list(box, src=0)
        start = box[0]

    for step in range(start, args.steps):
        loss = lm_loss(model, batch(step, rank, world))
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"step {step + 1:3d}  loss {loss.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            adapter = get_model_state_dict(model, options=TRAINABLE)
            opt_state = get_optimizer_state_dict(model, opt, options=FULL)
            if rank == 0:
                torch.save({"adapter": adapter, "opt": opt_state, "step": step + 1}, os.path.join(args.out, f"adapter_{step + 1}.pt"))

    with torch.no_grad():
        held_out = lm_loss(model, batch(0, rank, world, seed=9000))
    dist.all_reduce(held_out)
    if rank == 0:
        print(f"held-out loss {held_out.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
