"""Speech-enhancement toy (mask estimation on magnitude frames); validates and exports EMA weights."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BINS = 24


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.gate = nn.Linear(d, d)

    def forward(self, x):
        h = self.norm(x)
        return x + torch.sigmoid(self.gate(h)) * self.conv(h.transpose(1, 2)).transpose(1, 2)


class MaskNet(nn.Module):
    def __init__(self, d=24, depth=2):
        super().__init__()
        self.inp = nn.Linear(BINS, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.out = nn.Linear(d, BINS)

    def forward(self, noisy):
        h = self.inp(noisy)
        for b in self.blocks:
            h = b(h)
        return noisy * torch.sigmoid(self.out(h))


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.live = dict(model.named_parameters())
        self.shadow = {n: p.detach().clone() for n, p in self.live.items()}

    @torch.no_grad()
    def update(self):
        for n, p in self.live.items():
            local(self.shadow[n]).lerp_(local(p.detach()), 1 - self.decay)

    @contextlib.contextmanager
    @torch.no_grad()
    def applied(self):
        backup = {n: local(p.detach()).clone() for n, p in self.live.items()}
        for n, p in self.live.items():
            local(p.detach()).copy_(local(self.shadow[n]))
        yield
        for n, p in self.live.items():
            local(p.detach()).copy_(backup[n])


def mixtures(n, seed):
    g = torch.Generator().manual_seed(seed)
    f = torch.arange(BINS).float()
    c = 4 + 16 * torch.rand(n, 1, 1, generator=g) + torch.linspace(-2, 2, 12)[None, :, None]
    clean = torch.exp(-((f - c) ** 2) / 6) * 2
    return clean + torch.rand(n, 12, BINS, generator=g), clean


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    noisy, clean = data
    err = (model(noisy[rank::world]) - clean[rank::world]).square().sum()
    dist.all_reduce(err)
    model.train()
    return err.item() / clean.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MaskNet()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ema = EMA(model, 0.9)
    history = torch.full((a.steps // a.eval_every, 2), float("nan"))

    def state():
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "ema": ema.shadow, "history": history}

    start = 0
    if a.resume:
        start = max(int(n[1:]) for n in os.listdir(a.resume))
        s = state()
        dcp.load(s, checkpoint_id=os.path.join(a.resume, f"n{start}"))
        set_state_dict(model, opt, model_state_dict=s["model"], optim_state_dict=s["opt"])

    noisy, clean = mixtures(96, seed=1)
    val = mixtures(48, seed=2)
    for step in range(start, a.steps):
        idx = torch.randperm(96, generator=torch.Generator().manual_seed(step))[: a.batch].chunk(world)[rank]
        loss = (model(noisy[idx]) - clean[idx]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update()
        if (step + 1) % a.eval_every == 0:
            raw = evaluate(model, val, rank, world)
            with ema.applied():
                smooth = evaluate(model, val, rank, world)
            history[step // a.eval_every] = torch.tensor([raw, smooth])
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.5f} val raw {raw:.5f} ema {smooth:.5f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(a.out, f"n{step + 1}"))

    if a.export:
        with ema.applied():
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            full = {k: v.clone() for k, v in full.items()}
        if rank == 0:
            torch.save({"weights": full, "val_history": history}, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
