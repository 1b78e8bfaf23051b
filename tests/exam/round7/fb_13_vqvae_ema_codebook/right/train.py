"""VQ-VAE on synthetic image patches with an EMA codebook."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from quantizer import EMAQuantizer


class VQVAE(nn.Module):
    def __init__(self, patch=16, hidden=32, dim=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(patch, hidden), nn.SiLU(), nn.Linear(hidden, dim))
        self.quantizer = EMAQuantizer(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, patch))

    def forward(self, x):
        z = self.encoder(x)
        q, commit, idx = self.quantizer(z)
        return self.decoder(q), commit, z.detach(), idx


def patches(step, n):
    g = torch.Generator().manual_seed(40 + step)
    ang = torch.randint(0, 4, (n, 4, 1), generator=g) * 0.785
    i = torch.arange(16)
    wave = torch.cos(ang) * (i % 4) + torch.sin(ang) * (i // 4)
    return torch.sin(1.6 * wave + 0.3 * torch.randn(n, 4, 1, generator=g)) + 0.05 * torch.randn(n, 4, 16, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(30)
    model = VQVAE()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    opt = torch.optim.NAdam(model.parameters(), lr=args.lr)

    def snapshot(step):
        # the buffers of the quantiser are part of the model's state dict
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": step}

    start = 0
    if args.resume:
        state = snapshot(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        start = state["step"]

    for step in range(start, args.steps):
        x = patches(step, args.batch).chunk(world)[rank]
        recon, commit, z, idx = model(x)
        rec = (recon - x).square().mean()
        opt.zero_grad()
        (rec + 0.25 * commit).backward()
        opt.step()
        model.quantizer.update(z, idx)

        log = torch.stack([rec.detach(), commit.detach()])
        dist.all_reduce(log)
        if rank == 0:
            rec, commit = (log / world).tolist()
            print(f"step {step + 1:3d} rec {rec:.5f} commit {commit:.5f} restarts {model.quantizer.restarts.item()}")
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=f"{args.out}/s{step + 1:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
