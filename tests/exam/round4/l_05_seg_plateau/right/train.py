"""Lesion segmentation with images from two cameras; the learning rate follows the validation loss."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def camera(n, seed, dark):
    """Discs on a textured ground; the second camera is darker and noisier."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    c = 2 + 8 * torch.rand(n, 2, 1, 1, generator=g)
    r = 1.5 + 2 * torch.rand(n, 1, 1, generator=g)
    mask = (((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) < r ** 2).float()
    img = mask + 0.3 * torch.randn(n, 12, 12, generator=g)
    if dark:
        img = 0.5 * img - 0.2 + 0.35 * torch.randn(n, 12, 12, generator=g)
    return img.unsqueeze(1), mask


def interleave(a, b):
    return tuple(torch.stack([p, q], 1).flatten(0, 1) for p, q in zip(a, b))


class SegNet(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.GroupNorm(2, ch), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(ch, 2 * ch, 3, padding=1), nn.GroupNorm(2, 2 * ch), nn.ReLU())
        self.dec = nn.Sequential(nn.Conv2d(3 * ch, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, 1, 1))

    def forward(self, x):
        e = self.enc(x)
        m = F.interpolate(self.mid(F.max_pool2d(e, 2)), scale_factor=2)
        return self.dec(torch.cat([e, m], 1)).squeeze(1)


@torch.no_grad()
def validate(model, images, masks, rank, world):
    """Mean pixel loss over the validation set."""
    model.eval()
    tally = torch.zeros(2, dtype=torch.float64)
    for i in range(rank * 8, len(images), world * 8):
        loss = F.binary_cross_entropy_with_logits(model(images[i:i + 8]), masks[i:i + 8], reduction="sum")
        tally += torch.tensor([loss.item(), masks[i:i + 8].numel()], dtype=torch.float64)
    dist.all_reduce(tally)
    model.train()
    return (tally[0] / tally[1]).item()


def save(folder, step, model, opt, plateau):
    m, o = get_state_dict(model, opt, options=FULL)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "partial.pt")
        torch.save({"model": m, "opt": o, "plateau": plateau.state_dict(), "step": step}, tmp)
        os.replace(tmp, os.path.join(folder, f"ckpt_{step:04d}.pt"))
    dist.barrier()


def load(folder, model, opt, plateau):
    path = os.path.join(folder, max(f for f in os.listdir(folder) if f.startswith("ckpt_")))
    sd = torch.load(path, map_location="cpu", weights_only=False)
    plateau.load_state_dict(sd["plateau"])
    set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"], options=BCAST)
    return sd["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--val-every", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = SegNet()
    for part in (model.enc, model.mid, model.dec):
        fully_shard(part)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)

    x, y = interleave(camera(64, 1, False), camera(64, 2, True))
    vx, vy = (torch.cat([a, b]) for a, b in zip(camera(8, 3, False), camera(24, 4, True)))
    start = load(args.resume, model, opt, plateau) if args.resume else 0

    for step in range(start + 1, args.steps + 1):
        ids = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:args.batch][rank::world]
        loss = F.binary_cross_entropy_with_logits(model(x[ids]), y[ids])
        opt.zero_grad()
        loss.backward()
        opt.step()

        if step % args.val_every == 0:
            val = validate(model, vx, vy, rank, world)
            plateau.step(val)
            total = loss.detach() / world
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step:3d} loss {total.item():.4f} val {val:.4f} lr {opt.param_groups[0]['lr']:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt, plateau)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
