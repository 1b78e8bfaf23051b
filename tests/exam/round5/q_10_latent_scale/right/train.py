import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from flow import LatentFlow
from images import draw, make_images


def summed(v):
    dist.all_reduce(v)
    return v


def checkpoint_state(model, opt):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = LatentFlow()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr, momentum=0.9)
    images = make_images(200, seed=6)

    start = 0
    if args.resume:
        start = max(int(n) for n in os.listdir(args.resume) if n.isdigit())
        state = checkpoint_state(model, opt)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, str(start)))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])

    for step in range(start, args.steps):
        img, noise, t = draw(images, step, args.batch, rank, world)
        if model.scaler.factor == 0:
            model.scaler.calibrate(model.encode(img), summed)
            if rank == 0:
                print(f"latent scale {model.scaler.factor.item():.4f}")
        loss = model(img, noise, t)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = summed(loss.detach().clone()).item() / world
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {shown:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(checkpoint_state(model, opt), checkpoint_id=os.path.join(args.out, str(step + 1)))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        full["latent_scale"] = model.scaler.factor.clone()
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
