import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diffusion import GaussianDiffusion
from unet import Denoiser


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--global-batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--preview-every", type=int, default=3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    return p.parse_args()


def make_images(n, seed):
    """Blobs of random position and width."""
    g = torch.Generator().manual_seed(seed)
    c = torch.rand(n, 2, generator=g) * 6 + 1
    w = torch.rand(n, 1, 1, generator=g) * 1.5 + 0.7
    yy, xx = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    d = (yy - c[:, :1, None]) ** 2 + (xx - c[:, 1:, None]) ** 2
    return (2 * torch.exp(-d / (2 * w**2)) - 1).unsqueeze(1)


@torch.no_grad()
def heldout_loss(model, diff, images):
    g = torch.Generator().manual_seed(99)
    t = torch.randint(0, diff.T, (len(images),), generator=g)
    noise = torch.randn(images.shape, generator=g)
    return (model(diff.add_noise(images, t, noise), t) - noise).pow(2).mean().item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    train, held = make_images(512, 1), make_images(64, 2)
    diff = GaussianDiffusion()
    model = Denoiser()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    # every rank draws the whole global batch from the same stream and keeps its own rows
    torch.manual_seed(1234)
    first = 0
    if args.resume:
        path = max(glob.glob(os.path.join(args.resume, "step_*")), key=lambda s: int(s.rsplit("_", 1)[1]))
        ms, os_ = get_state_dict(model, opt)
        state = {"model": ms, "opt": os_, "step": 0, "rng": torch.get_rng_state()}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        first = state["step"]
        torch.set_rng_state(state["rng"])

    for step in range(first, args.steps):
        idx = torch.randint(0, len(train), (args.global_batch,))
        t = torch.randint(0, diff.T, (args.global_batch,))
        noise = torch.randn(args.global_batch, 1, 8, 8)
        idx, t, noise = idx[rank::world], t[rank::world], noise[rank::world]

        pred = model(diff.add_noise(train[idx], t, noise), t)
        loss = (pred - noise).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

        done = step + 1
        if done % args.preview_every == 0:
            log = loss.detach().clone()
            dist.all_reduce(log)
            pics = diff.sample(model, 8, seed=7)
            held_loss = heldout_loss(model, diff, held)
            if rank == 0:
                print(f"step {done} loss {log.item() / world:.4f} held-out {held_loss:.5f} "
                      f"preview mean {pics.mean():.4f} std {pics.std():.4f}")
        if args.save_every and done % args.save_every == 0:
            ms, os_ = get_state_dict(model, opt)
            state = {"model": ms, "opt": os_, "step": done, "rng": torch.get_rng_state()}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"step_{done}"))

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
