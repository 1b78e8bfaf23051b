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

from features import corpus_stats, log_spectrogram, make_clips
from model import Tagger

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def save(folder, model, opt, step):
    state = {
        "model": get_model_state_dict(model, options=FULL),
        "opt": get_optimizer_state_dict(model, opt, options=FULL),
        "step": step,
    }
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, os.path.join(folder, "tmp"))
        os.replace(os.path.join(folder, "tmp"), os.path.join(folder, "last.pt"))
    dist.barrier()


def load(folder, model, opt):
    state = torch.load(os.path.join(folder, "last.pt"), map_location="cpu")
    set_model_state_dict(model, state["model"], options=SPREAD)
    set_optimizer_state_dict(model, opt, state["opt"], options=SPREAD)
    return state["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    wav, y = make_clips()
    train_wav, train_y, val_wav, val_y = wav[:320], y[:320], wav[320:], y[320:]
    mean, std = corpus_stats(train_wav, rank, world)

    torch.manual_seed(0)
    model = Tagger(mean, std)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start = load(args.resume, model, opt) if args.resume else 0

    per_epoch = len(train_wav) // args.global_batch
    for step in range(start, args.steps):
        epoch, pos = divmod(step, per_epoch)
        order = torch.randperm(len(train_wav), generator=torch.Generator().manual_seed(epoch))
        batch = order[pos * args.global_batch : (pos + 1) * args.global_batch][rank::world]
        loss = F.cross_entropy(model(log_spectrogram(train_wav[batch])), train_y[batch])
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 5 == 0 or step == args.steps - 1:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, model, opt, step + 1)

    with torch.no_grad():
        hits = (model(log_spectrogram(val_wav[rank::world])).argmax(-1) == val_y[rank::world]).sum()
    dist.all_reduce(hits)
    full = get_model_state_dict(model, options=FULL)
    if rank == 0:
        print(f"val accuracy {hits.item() / len(val_y):.3f}")
        if args.export:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
