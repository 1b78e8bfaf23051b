"""Low-rank tuning of a keyword spotter. The moving average of the adapters is what is evaluated and released."""
import argparse
import math
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ema import AdapterEMA
from model import KeywordModel


def keywords(n, seed, classes=6, length=96):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    t = torch.arange(length) / length
    f = (3 + 3 * y)[:, None] + torch.rand(n, 1, generator=g)
    wave = torch.sin(2 * math.pi * (f * t + torch.rand(n, 1, generator=g)))
    return wave + 0.3 * torch.randn(n, length, generator=g), y


def snapshot(model, opt, ema, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "optim": o, "ema": ema.shadow, "step": step}


@torch.no_grad()
def evaluate(model, rank, world):
    wave, y = keywords(256, seed=12345)
    logits = model(wave[rank::world])
    sums = torch.stack([F.cross_entropy(logits, y[rank::world], reduction="sum"),
                        (logits.argmax(1) == y[rank::world]).sum().float()])
    dist.all_reduce(sums)
    return (sums / len(y)).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=90)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--decay", type=float, default=0.98)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = KeywordModel()
    model.freeze_base()
    for conv in model.convs:
        fully_shard(conv)
    fully_shard(model, reshard_after_forward=True)  # weights change between evaluations
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    ema = AdapterEMA(model, args.decay)

    start = 0
    if args.resume:
        path = max(Path(args.resume).iterdir(), key=lambda p: int(re.sub(r"\D", "", p.name)))
        state = snapshot(model, opt, ema, 0)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        ema.shadow, start = state["ema"], state["step"]

    for step in range(start + 1, args.steps + 1):
        wave, y = (t.chunk(world)[rank] for t in keywords(args.batch, seed=step))
        loss = F.cross_entropy(model(wave), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(model, opt, ema, step), checkpoint_id=Path(args.out) / f"s{step}")

    live = evaluate(model, rank, world)
    ema.swap()
    average = evaluate(model, rank, world)
    if rank == 0:
        print(f"live weights: loss {live[0]:.4f} accuracy {live[1]:.4f}")
        print(f"averaged weights: loss {average[0]:.4f} accuracy {average[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
