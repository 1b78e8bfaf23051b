"""Train a small image classifier with FSDP2 and export it to int8 for the phone."""
import argparse
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from export import dequantise, export_int8
from student import MobileNet


def shapes(n, seed):
    """Oriented bars: the class is the orientation."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    ys, xs = torch.meshgrid(torch.arange(12.0) - 5.5, torch.arange(12.0) - 5.5, indexing="ij")
    a = (y * torch.pi / 6)[:, None, None]
    off = torch.rand(n, 1, 1, generator=g) * 4 - 2
    bar = ((xs * a.cos() + ys * a.sin() - off).abs() < 1.2).float()
    return (bar + 0.25 * torch.randn(bar.shape, generator=g))[:, None], y


def batches(x, y, size, rng):
    """Endless shuffled batches of the whole job."""
    while True:
        order = list(range(len(x)))
        rng.shuffle(order)
        for i in range(0, len(order) - size + 1, size):
            pick = torch.tensor(order[i:i + size])
            yield x[pick], y[pick]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out")
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    model = MobileNet()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=args.steps)

    x, y = shapes(256, seed=1)
    vx, vy = shapes(120, seed=2)
    stream = batches(x, y, 32, random.Random(5))
    step = 0
    if args.resume:
        last = sorted(os.listdir(args.resume), key=lambda s: int(s.rsplit("_", 1)[1]))[-1]
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "opt": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)
        sched.load_state_dict(sd["sched"])
        step = sd["step"]
        for _ in range(step):
            next(stream)

    while step < args.steps:
        bx, by = next(stream)
        bx, by = bx[rank::world], by[rank::world]
        loss = F.cross_entropy(model(bx), by, label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        step += 1
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "sched": sched.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.out, f"it_{step}"))

    with torch.no_grad():
        logits = model(vx)  # every rank sees all of the validation set
        if rank == 0:
            print(f"val loss {F.cross_entropy(logits, vy):.4f} acc {(logits.argmax(1) == vy).float().mean():.3f}")
    model.reshard()
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "phone_int8.pt")
        export_int8(model, path)
        if rank == 0:
            phone = MobileNet()
            phone.load_state_dict(dequantise(torch.load(path)))
            with torch.no_grad():
                logits = phone(vx)
            print(f"int8 val loss {F.cross_entropy(logits, vy):.4f} acc {(logits.argmax(1) == vy).float().mean():.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
