import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from codec import Codec


def tones(step, batch, length=64):
    g = torch.Generator().manual_seed(900 + step)
    t = torch.arange(length) / length
    wave = torch.zeros(batch, length)
    for _ in range(2):
        f = torch.randint(1, 9, (batch, 1), generator=g)
        a = 0.3 + 0.7 * torch.rand(batch, 1, generator=g)
        wave += a * torch.sin(6.2832 * (f * t + torch.rand(batch, 1, generator=g)))
    return wave


def checkpoint_state(model, opt):
    weights, moments = get_state_dict(model, opt)
    return {"model": weights, "opt": moments}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = Codec()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.8, 0.99))

    step = 0
    if args.resume:
        step = max(int(p.name) for p in args.resume.iterdir() if p.name.isdigit())
        state = checkpoint_state(model, opt)
        dcp.load(state, checkpoint_id=args.resume / str(step))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])

    while step < args.steps:
        wave = tones(step, args.batch).chunk(world)[rank]
        loss, index = model(wave)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % 3 == 0:
            stats = torch.stack([loss.detach(), torch.tensor(float(index.unique().numel()))])
            dist.all_reduce(stats)
            if rank == 0:
                print(f"{step} loss {stats[0] / world:.5f} codes used per rank {stats[1] / world:.1f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(checkpoint_state(model, opt), checkpoint_id=args.out / str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
