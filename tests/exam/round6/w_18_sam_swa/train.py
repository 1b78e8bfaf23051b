"""Volatility forecasting with SAM and averaged weights; the average is judged in the middle of the training too."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sam import SAM, WeightAverage

WINDOW = 24


def garch(n=400, seed=3):
    g = torch.Generator().manual_seed(seed)
    var, out = torch.ones(16), []
    for _ in range(n // 4):
        r = var.sqrt() * torch.randn(16, generator=g)
        out.append(r)
        var = 0.05 + 0.15 * r.square() + 0.8 * var
    return torch.stack(out, dim=1)


def cut(series, starts):
    x = torch.cat([series[:, s:s + WINDOW] for s in starts])
    y = torch.cat([series[:, s + WINDOW:s + WINDOW + 5].square().mean(1) for s in starts])
    return x, y.log1p()


class Net(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.front = nn.Linear(2 * WINDOW, width)
        self.mid = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.front(torch.cat([x, x.square()], dim=1)))
        for m in self.mid:
            h = h + torch.tanh(m(h))
        return self.last(h)[:, 0]


def shard(t):
    return t.chunk(dist.get_world_size())[dist.get_rank()]


@torch.no_grad()
def evaluate(model, series):
    x, y = cut(series, [70])
    err = (model(shard(x)) - shard(y)).square().sum()
    dist.all_reduce(err)
    model.reshard()  # no backward follows that would do it
    return err.item() / len(y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(13)
    series = garch()
    model = Net()
    for m in model.mid:
        fully_shard(m)
    fully_shard(model)
    base = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5)
    sam = SAM(model.parameters(), base)
    average = WeightAverage(model, start=10)

    def state():
        m, o = get_state_dict(model, base)
        return {"model": m, "optim": o, "mean": average.mean, "count": average.count, "step": step}

    step = 0
    if args.resume:
        s = state()
        dcp.load(s, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume), key=int)))
        set_state_dict(model, base, model_state_dict=s["model"], optim_state_dict=s["optim"])
        average.mean, average.count, step = s["mean"], s["count"], s["step"]
    while step < args.steps:
        g = torch.Generator().manual_seed(step)
        x, y = map(shard, cut(series, torch.randint(40, (2,), generator=g).tolist()))
        first = (model(x) - y).square().mean()
        first.backward()
        sam.climb()
        (model(x) - y).square().mean().backward()
        sam.descend()
        step += 1
        average.update(step)
        if step % 6 == 0:
            now = evaluate(model, series)
            line = f"step {step} test {now:.4f}"
            if average.count:
                average.swap()
                line += f" averaged {evaluate(model, series):.4f}"
                average.swap()
            if dist.get_rank() == 0:
                print(line, flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, str(step)))
    average.swap()
    final = evaluate(model, series)
    if dist.get_rank() == 0:
        print(f"final averaged model: test {final:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
