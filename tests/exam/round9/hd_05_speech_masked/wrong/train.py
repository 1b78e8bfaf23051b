"""Masked pretraining of a speech encoder with FSDP2."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import checkpointing
from audio import SpanMasker, spectrograms
from model import MaskedSpeechEncoder


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = MaskedSpeechEncoder()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    masker = SpanMasker(77, rank)

    start = checkpointing.load_latest(args.resume, model, opt, masker) if args.resume else 0
    for step in range(start, args.steps):
        spec = spectrograms(step, args.batch).chunk(world)[rank]
        mask = masker(*spec.shape[:2])
        error = (model(spec, mask) - spec).square().mean(-1)
        counts = mask.sum().float()
        dist.all_reduce(counts)
        loss = (error * mask).sum() / counts * world
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} masked mse {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpointing.save(args.out, step + 1, model, opt, masker)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
