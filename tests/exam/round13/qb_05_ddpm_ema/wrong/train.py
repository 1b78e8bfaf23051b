import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from diffusion import Cosine, draw, loss_of
from ema import EMA
from net import EpsNet


def arguments():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--decay", type=float, default=0.99)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    return ap.parse_args()


def mean_over_ranks(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x.item() / dist.get_world_size()


def main():
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = EpsNet()
    for b in net.blocks:
        fully_shard(b)
    fully_shard(net, reshard_after_forward=True)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    ema = EMA(net, args.decay)
    schedule = Cosine()

    def bundle():
        m, o = get_state_dict(net, opt)
        return {"net": m, "opt": o, "ema": ema.shadow}

    start = 0
    if args.resume:
        start = int(open(os.path.join(args.resume, "latest")).read())
        state = bundle()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"ckpt{start}"))
        set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])

    for step in range(start, args.steps):
        loss = loss_of(net, schedule, *draw(step, args.batch, rank, world))
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        if step % 7 == 0:
            value = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step} loss {value:.4f}", flush=True)
        if step + 1 == args.save_at:
            dcp.save(bundle(), checkpoint_id=os.path.join(args.out, f"ckpt{step + 1}"))
            if rank == 0:
                with open(os.path.join(args.out, "latest"), "w") as f:
                    f.write(str(step + 1))

    held_out = draw(10**6, 64, rank, world)
    with torch.no_grad():
        plain = mean_over_ranks(loss_of(net, schedule, *held_out))
        kept = ema.exchange(net)
        averaged = mean_over_ranks(loss_of(net, schedule, *held_out))
        ema.restore(net, kept)
    weights = ema.full()
    if rank == 0:
        print(f"held out: weights {plain:.6f} averaged {averaged:.6f}")
        if args.out or args.resume:
            torch.save(weights, os.path.join(args.out or args.resume, "ema.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
