import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from evaluate import evaluate
from model import WorldModel
from replay import Replay


def save(path, step, model, opt):
    # all ranks use the same random stream, rank 0's state stands for all
    msd, osd = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"model": msd, "opt": osd, "rng": torch.get_rng_state(), "step": step}, path)
    dist.barrier()


def load(path, model, opt):
    blob = torch.load(path)
    set_state_dict(model, opt, model_state_dict=blob["model"], optim_state_dict=blob["opt"],
                   options=StateDictOptions(full_state_dict=True))
    torch.set_rng_state(blob["rng"])
    return blob["step"]


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    replay, model = Replay(), WorldModel()
    for part in (model.encode, model.prior, model.decode):
        for p in part.parameters():
            p.data.mul_(0.8)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    step = load(os.path.join(args.resume, "state.pt"), model, opt) if args.resume else 0
    while step < args.steps:
        obs, act = replay.sample(args.batch)
        noise = torch.randn(args.batch, obs.shape[1], model.latent)
        loss = model(*(t.chunk(world)[rank] for t in (obs, act, noise)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % args.eval_every == 0 or step == args.steps:
            test = evaluate(model, replay)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item() / world:.4f}  test {test:.4f}", flush=True)
        if args.save_at and step == args.save_at:
            save(os.path.join(args.out, "state.pt"), step, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--seed", type=int, default=2)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    main(ap.parse_args())
