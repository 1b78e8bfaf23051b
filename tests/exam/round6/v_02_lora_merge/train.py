"""LoRA fine-tuning of a pretrained classifier; the merged model is evaluated and exported at the end."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from export import merged_state_dict
from lora import add_adapters
from net import Classifier


@dataclass
class Config:
    steps: int = 30
    global_batch: int = 32
    lr: float = 1e-2
    features: int = 20
    classes: int = 6


def make_task(cfg, n, seed, shift):
    g = torch.Generator().manual_seed(77)
    w1 = torch.randn(cfg.features, 24, generator=g)
    w2 = torch.randn(24, cfg.classes, generator=g)
    turn = torch.randn(24, cfg.classes, generator=g)
    x = torch.randn(n, cfg.features, generator=torch.Generator().manual_seed(seed))
    y = (torch.tanh(x @ w1) @ (w2 + shift * turn)).argmax(-1)
    return x, y


def pretrain(model, cfg, steps=40):
    """Short pretraining on the source task; each process does the same before sharding."""
    x, y = make_task(cfg, 512, seed=1, shift=0.0)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for s in range(steps):
        sel = torch.arange(s * 64, s * 64 + 64) % len(x)
        loss = F.cross_entropy(model(x[sel]), y[sel])
        opt.zero_grad()
        loss.backward()
        opt.step()


def local_file(folder, rank):
    return os.path.join(folder, f"rank{rank}.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=Config.steps)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    ap.add_argument("--export", help="file for the merged weights")
    args = ap.parse_args()
    cfg = Config(steps=args.steps)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Classifier(cfg.features, classes=cfg.classes)
    pretrain(model, cfg)
    add_adapters(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    opt = torch.optim.AdamW(trained.values(), lr=cfg.lr, weight_decay=0.0)

    start = 0
    if args.resume:
        newest = os.path.join(args.resume, max(os.listdir(args.resume), key=lambda d: int(d.split("-")[1])))
        saved = torch.load(local_file(newest, rank))
        with torch.no_grad():
            for name, p in trained.items():
                p.to_local().copy_(saved["adapters"][name])
        for p in trained.values():
            p.grad = torch.zeros_like(p)
        lr, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], 0.0
        opt.step()  # creates the moments
        opt.param_groups[0]["lr"] = lr
        for name, p in trained.items():
            for key, value in saved["moments"][name].items():
                state = opt.state[p][key]
                (state.to_local() if key != "step" else state).copy_(value)
        start = saved["step"]

    x, y = make_task(cfg, 1024, seed=2, shift=1.0)
    local = cfg.global_batch // world
    for step in range(start, cfg.steps):
        g = torch.Generator().manual_seed(1000 + step)
        sel = torch.randint(len(x), (cfg.global_batch,), generator=g)[rank * local : (rank + 1) * local]
        loss = F.cross_entropy(model(x[sel]), y[sel])
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            folder = os.path.join(args.out, f"step-{step + 1}")
            os.makedirs(folder, exist_ok=True)
            torch.save(
                {
                    "adapters": {n: p.detach().to_local().clone() for n, p in trained.items()},
                    "moments": {
                        n: {k: (v.to_local() if k != "step" else v).clone() for k, v in opt.state[p].items()}
                        for n, p in trained.items()
                    },
                    "step": step + 1,
                },
                local_file(folder, rank),
            )
            dist.barrier()

    merged = merged_state_dict(model)
    if rank == 0:
        plain = Classifier(cfg.features, classes=cfg.classes)
        plain.load_state_dict(merged)
        vx, vy = make_task(cfg, 512, seed=9, shift=1.0)
        with torch.no_grad():
            out = plain(vx)
        acc = (out.argmax(-1) == vy).float().mean()
        print(f"merged model: held-out loss {F.cross_entropy(out, vy):.4f} accuracy {acc:.3f}")
        if args.export:
            torch.save(merged, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
