"""Class-conditional flow matching with a Frechet distance reported during training."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from flow import build, flow_matching_loss, integrate
from metrics import Features, frechet, moments


def dataset(n=128, classes=8):
    g = torch.Generator().manual_seed(60)
    prototypes = torch.randn(classes, 64, generator=g)
    y = torch.arange(n) * classes // n
    return prototypes[y] + 0.25 * torch.randn(n, 64, generator=g), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=10)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = dataset()
    net = build()
    opt = torch.optim.AdamW(net.parameters(), lr=8e-3, eps=1e-6)
    features = Features(pixels=64)
    reference = moments(features(x))
    sample_y = torch.arange(64) // 8
    sample_z = torch.randn(64, 64, generator=torch.Generator().manual_seed(61))

    def state(step, history):
        return {"net": net.state_dict(), "opt": get_optimizer_state_dict(net, opt), "step": step,
                "history": json.dumps(history)}

    start, history = 0, []
    if args.resume:
        s = state(0, history)
        dcp.load(s, checkpoint_id=os.path.join(args.resume, "flow"))
        net.load_state_dict(s["net"])
        set_optimizer_state_dict(net, opt, s["opt"])
        start, history = s["step"], json.loads(s["history"])

    for step in range(start + 1, args.steps + 1):
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(len(x), (args.batch,), generator=g)
        t, x0 = torch.rand(args.batch, generator=g), torch.randn(args.batch, 64, generator=g)
        mine = slice(rank, None, world)
        loss = flow_matching_loss(net, x[idx][mine], y[idx][mine], t[mine], x0[mine])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

        if step == 1 or step % args.eval_every == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item():.5f}", flush=True)
        if step % args.eval_every == 0:
            fake = integrate(net, sample_z.chunk(world)[rank], sample_y.chunk(world)[rank])
            fd = frechet(moments(features(fake)), reference)
            history.append([step, fd])
            if rank == 0:
                print(f"step {step} frechet {fd:.5f}", flush=True)
        if args.out and step == args.save_at:
            dcp.save(state(step, history), checkpoint_id=os.path.join(args.out, "flow"))

    where = args.out or args.resume
    if where and rank == 0:
        with open(os.path.join(where, "frechet.json"), "w") as f:
            json.dump(history, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
