"""CTC training of a small phone recogniser; validation uses the moving average of the weights."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from data import utterances
from ema import WeightAverage
from model import Recogniser


def ctc(logp, phones):
    frames = torch.full((len(logp),), logp.shape[1])
    lengths = torch.full((len(phones),), phones.shape[1])
    return F.ctc_loss(logp.transpose(0, 1), phones, frames, lengths, reduction="none").mean()


@torch.no_grad()
def validate(model, rank, world):
    feats, phones = (t[rank::world] for t in utterances(99, 32))
    loss = ctc(model(feats), phones) / world
    dist.all_reduce(loss)
    return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = Recogniser()
    fully_shard(model.front)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    ema = WeightAverage(model, decay=0.97)

    step = 0
    if args.resume:
        newest = max(Path(args.resume).iterdir(), key=lambda d: int(d.name))
        state = torch.load(newest / f"rank{rank}.pt", weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        ema.load_state_dict(state["ema"])
        step = state["step"]

    while step < args.steps:
        feats, phones = (t[rank::world] for t in utterances(1000 + step, args.batch))
        loss = ctc(model(feats), phones)
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update(model)
        step += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
        if step % args.eval_every == 0:
            with ema.applied_to(model):
                val = validate(model, rank, world)
            if rank == 0:
                print(f"step {step} validation {val:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            folder = Path(args.out) / str(step)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "ema": ema.state_dict(), "step": step},
                       folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
