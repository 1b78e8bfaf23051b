"""VQ autoencoder of patches. The codebook is a moving average, all the rest is trained with AdamW under FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from net import PatchVQ

STEPS, BATCH = 24, 128


def patches(n, gen):
    """4x4 patches: edges of 6 orientations with a random contrast."""
    ys, xs = torch.meshgrid(torch.arange(4.0) - 1.5, torch.arange(4.0) - 1.5, indexing="ij")
    a = torch.randint(0, 6, (n, 1, 1), generator=gen) * (torch.pi / 3)
    c = 0.5 + torch.rand(n, 1, 1, generator=gen)
    p = c * torch.tanh(ys * a.sin() + xs * a.cos())
    return (p + 0.05 * torch.randn(p.shape, generator=gen)).flatten(1)


def local(t, rank, world):
    return t.view(world, -1, t.shape[1])[rank]


@torch.no_grad()
def validation(model, x, rank, world):
    out, _, index, _ = model(local(x, rank, world))
    err = (out - local(x, rank, world)).pow(2).sum()
    dist.all_reduce(err)
    return err.item() / x.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(13)
    model = PatchVQ()
    fully_shard(model.enc[1])
    fully_shard(model.dec[1])
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(40)
    val = patches(256, torch.Generator().manual_seed(41))

    first = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda s: int(s[1:]))
        m, o = get_state_dict(model, opt)
        sd = {"m": m, "o": o, "gen": gen.get_state(), "step": 0}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)
        gen.set_state(sd["gen"])
        first = sd["step"]

    for step in range(first + 1, STEPS + 1):
        x = local(patches(BATCH, gen), rank, world)
        out, z, index, commit = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        model.book.update(z, index, gen)
        if step % 4 == 0:
            v = validation(model, val, rank, world)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} val mse {v:.5f} revived {model.book.revived}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o, "gen": gen.get_state(), "step": step},
                     checkpoint_id=os.path.join(args.out, f"s{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
