"""Waveform denoiser (small U-Net in 1D). The weights with the best validation loss are the result of the training."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Down(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, 5, 2, 2)

    def forward(self, x):
        return F.leaky_relu(self.conv(x), 0.1)


class Up(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.ConvTranspose1d(cin, cout, 4, 2, 1)

    def forward(self, x):
        return F.leaky_relu(self.conv(x), 0.1)


class WaveUNet(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.d1, self.d2 = Down(1, ch), Down(ch, 2 * ch)
        self.u2, self.u1 = Up(2 * ch, ch), Up(2 * ch, ch)
        self.out = nn.Conv1d(ch, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(a)
        return self.out(self.u1(torch.cat([self.u2(b), a], 1)))


def waves(n, seed, length=32):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length) / length
    f = 1 + 4 * torch.rand(n, 1, generator=g)
    clean = torch.sin(6.2832 * f * t + 6.2832 * torch.rand(n, 1, generator=g))
    noisy = clean + 0.4 * torch.randn(n, length, generator=g)
    return noisy[:, None], clean[:, None]


class BestKeeper:
    """Keeps a copy of the sharded weights with the lowest validation loss."""

    def __init__(self, model):
        self.model = model
        self.value = float("inf")
        self.step = -1
        self.weights = [p.to_local().clone() for p in model.parameters()]

    @torch.no_grad()
    def offer(self, value, step):
        if value < self.value:
            self.value, self.step = value, step
            for w, p in zip(self.weights, self.model.parameters()):
                w.copy_(p.to_local())

    @torch.no_grad()
    def restore(self):
        for w, p in zip(self.weights, self.model.parameters()):
            p.to_local().copy_(w)

    def state_dict(self):
        return {"value": self.value, "step": self.step, "weights": self.weights}

    def load_state_dict(self, state):
        self.value, self.step, self.weights = state["value"], state["step"], state["weights"]


@torch.no_grad()
def validate(model, data, rank, world):
    noisy, clean = (x.chunk(world)[rank] for x in data)
    sums = torch.tensor([F.l1_loss(model(noisy), clean, reduction="sum").item(), float(clean.numel())])
    model.reshard()  # without a backward the root would stay gathered
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save(folder, step, model, opt, best):
    path = os.path.join(folder, f"step{step}")
    os.makedirs(path, exist_ok=True)
    state = {
        "step": step,
        "model": [p.to_local().clone() for p in model.parameters()],
        "opt": {i: {k: (v.to_local() if hasattr(v, "to_local") else v) for k, v in opt.state[p].items()}
                for i, p in enumerate(model.parameters())},
        "best": best.state_dict(),
    }
    torch.save(state, os.path.join(path, f"rank{dist.get_rank()}.pt"))
    dist.barrier()
    if dist.get_rank() == 0:
        with open(os.path.join(folder, "latest.json"), "w") as f:
            json.dump({"path": path, "world": dist.get_world_size()}, f)


def load(folder, model, opt, best):
    with open(os.path.join(folder, "latest.json")) as f:
        latest = json.load(f)
    assert latest["world"] == dist.get_world_size(), "per-rank checkpoints need the same number of ranks"
    state = torch.load(os.path.join(latest["path"], f"rank{dist.get_rank()}.pt"))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.to_local().copy_(state["model"][i])
            for k, v in state["opt"][i].items():
                if torch.is_tensor(v) and v.shape == p.to_local().shape and k != "step":
                    full = torch.zeros_like(p)
                    full.to_local().copy_(v)
                    v = full
                opt.state[p][k] = v
    best.load_state_dict(state["best"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = WaveUNet()
    for m in (model.d1, model.d2, model.u2, model.u1):
        fully_shard(m)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    best = BestKeeper(model)
    val_data, test_data = waves(8, 999), waves(64, 4242)

    start = load(args.resume, model, opt, best) if args.resume else 0
    for step in range(start, args.steps):
        noisy, clean = (x.chunk(world)[rank] for x in waves(args.batch, step))
        loss = F.mse_loss(model(noisy), clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % args.eval_every == 0:
            val = validate(model, val_data, rank, world)
            best.offer(val, step + 1)
            if rank == 0:
                print(f"step {step + 1:3d} train {loss.item():.5f} val {val:.5f} best {best.value:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt, best)

    best.restore()
    test = validate(model, test_data, rank, world)
    if rank == 0:
        print(f"best step {best.step} val {best.value:.5f} test {test:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
