# Rectified-flow model on a 2-D pinwheel, exported with averaged weights for the sampler.
import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard


class VelocityNet(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.inp = nn.Linear(2 + 4, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(depth)
        )
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        feats = torch.stack([t, t**2, torch.sin(3.14159 * t), torch.cos(3.14159 * t)], dim=-1)
        h = self.inp(torch.cat([x, feats], dim=-1))
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self, model):
        """Run the body with the averaged weights in the model."""
        backup = {n: p.detach().clone() for n, p in model.named_parameters()}
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(self.shadow[n])
        try:
            yield model
        finally:
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(backup[n])


def pinwheel(n, seed):
    g = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, 5, (n,), generator=g)
    r = 0.3 + 1.5 * torch.rand(n, generator=g)
    ang = arm * 2 * torch.pi / 5 + 0.6 * r + 0.08 * torch.randn(n, generator=g)
    return torch.stack([r * ang.cos(), r * ang.sin()], dim=-1)


def flow_batch(data, step, size, rank, world):
    g = torch.Generator().manual_seed(50_000 + step)
    idx = torch.randint(0, len(data), (size,), generator=g)
    noise = torch.randn(size, 2, generator=g)
    t = torch.rand(size, generator=g)
    x1, x0, t = data[idx].chunk(world)[rank], noise.chunk(world)[rank], t.chunk(world)[rank]
    return (1 - t[:, None]) * x0 + t[:, None] * x1, t, x1 - x0


def export(model, ema, path):
    with ema.applied(model):
        weights = model.state_dict()
    weights = {k: v.full_tensor().clone() for k, v in weights.items()}
    if dist.get_rank() == 0:
        torch.save({"arch": "VelocityNet", "ema": True, "weights": weights}, path)


@torch.no_grad()
def validate(model, data, rank, world):
    tot = torch.zeros(2)
    for k in range(4):
        x, t, v = flow_batch(data, 10_000_000 + k, 256, rank, world)
        tot += torch.tensor([((model(x, t) - v) ** 2).sum().item(), float(v.numel())])
    dist.all_reduce(tot)
    return (tot[0] / tot[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--ema-decay", type=float, default=0.95)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs/flow")
    p.add_argument("--resume")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(11)
    model = VelocityNet()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    ema = EMA(model, a.ema_decay)
    first = 0
    if a.resume:
        newest = max(Path(a.resume).glob("step*"), key=lambda q: int(q.name[4:]))
        st = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt), "ema": ema.shadow}
        dcp.load(st, checkpoint_id=str(newest))
        set_model_state_dict(model, st["model"])
        set_optimizer_state_dict(model, opt, st["opt"])
        first = int(newest.name[4:])

    train, val = pinwheel(2048, 1), pinwheel(512, 2)
    for step in range(first + 1, a.steps + 1):
        x, t, v = flow_batch(train, step, a.batch_size, rank, world)
        loss = (model(x, t) - v).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
        if step % 5 == 0:
            with ema.applied(model):
                vloss = validate(model, val, rank, world)
            if rank == 0:
                print(f"[{step:4d}] train {loss.item():.4f} ema-val {vloss:.4f}", flush=True)
        if a.save_every and step % a.save_every == 0:
            st = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt), "ema": ema.shadow}
            dcp.save(st, checkpoint_id=f"{a.out}/step{step}")
            export(model, ema, f"{a.out}/step{step}/sampler.pt")
    if a.export:
        export(model, ema, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
