"""VQ-VAE on audio frames with FSDP2; codebook in replicated buffers."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from frames import local_part, make_frames
from model import VQVAE


def perplexity(idx, codes):
    use = torch.bincount(idx, minlength=codes).float()
    dist.all_reduce(use)
    p = use / use.sum()
    return torch.exp(-(p * (p + 1e-9).log()).sum()).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--export", default=None, help="final model with its codebook, for the tokenizer")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    model = VQVAE()
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))

    data = make_frames()
    for step in range(args.steps):
        x = local_part(data, step, args.batch, rank, world)
        recon, commit, idx = model(x)
        mse = F.mse_loss(recon, x)
        opt.zero_grad()
        (mse + commit).backward()
        opt.step()
        if step % 5 == 4:
            shown = mse.detach() / world
            dist.all_reduce(shown)
            ppl = perplexity(idx, len(model.vq.codebook))
            if rank == 0:
                print(f"step {step + 1} mse {shown.item():.4f} code perplexity {ppl:.2f}", flush=True)

    model.eval()
    with torch.no_grad():
        recon, _, _ = model(data.chunk(world)[rank])
        err = F.mse_loss(recon, data.chunk(world)[rank]) / world
    dist.all_reduce(err)
    if rank == 0:
        print(f"final mse {err.item():.4f}")
    if args.export:
        model.reshard()
        full = {n: p.full_tensor() for n, p in model.named_parameters()}
        full.update(model.named_buffers())
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
