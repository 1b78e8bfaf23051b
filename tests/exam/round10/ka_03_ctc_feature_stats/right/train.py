import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import checkpoint
import corpus
from model import CTCModel

GLOBAL_BATCH = 16
STEPS = 18
DEV = range(10_000, 10_016)


def ctc(model, items, ctc_loss):
    feats, flen, phones, plen = items
    logp = model(feats, flen)
    return ctc_loss(logp.transpose(0, 1), phones, flen, plen)


@torch.no_grad()
def evaluate(model, rank, world, ctc_loss):
    model.eval()
    total = ctc(model, corpus.batch(list(DEV)[rank::world]), ctc_loss)
    dist.all_reduce(total)
    model.train()
    return total.item() / len(DEV)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = CTCModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    ctc_loss = nn.CTCLoss(reduction="sum")

    progress = {"step": 0}
    app = checkpoint.AppState(model, opt, progress)
    if args.resume:
        checkpoint.load_latest(args.resume, app)

    while progress["step"] < STEPS:
        first = progress["step"] * GLOBAL_BATCH
        mine = list(range(first, first + GLOBAL_BATCH))[rank::world]
        loss = ctc(model, corpus.batch(mine), ctc_loss) / len(mine)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        opt.step()
        opt.zero_grad()
        progress["step"] += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {progress['step']} ctc {shown.item() / world:.4f}", flush=True)
        if args.save_every and progress["step"] % args.save_every == 0:
            checkpoint.save(args.out, app)

    dev = evaluate(model, rank, world, ctc_loss)
    if rank == 0:
        print(f"dev ctc {dev:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
