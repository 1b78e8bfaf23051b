import argparse, os, math
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
    get_model_state_dict,
)


def save_checkpoint(out, step, model, optim, extra=None):
    msd, osd = get_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(out, exist_ok=True)
        tmp = os.path.join(out, f"tmp_{step}.part")
        torch.save({"step": step, "model": msd, "optim": osd, "extra": extra or {}}, tmp)
        os.replace(tmp, os.path.join(out, f"step_{step:06d}.pt"))
    dist.barrier()


def load_checkpoint(folder, model, optim):
    files = sorted(f for f in os.listdir(folder) if f.startswith("step_") and f.endswith(".pt"))
    if not files:
        return 0, {}
    ck = torch.load(os.path.join(folder, files[-1]), map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        optim,
        model_state_dict=ck["model"],
        optim_state_dict=ck["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck["step"], ck["extra"]


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


class TimeEncoder(nn.Module):
    """Sine features of the absolute time (in hours) and the observed values."""

    def __init__(self, d=16):
        super().__init__()
        period = torch.tensor([24.0, 12.0, 168.0, 6.0])
        self.register_buffer("freq", 2 * math.pi / period, persistent=False)
        self.proj = nn.Linear(9, d)

    def forward(self, hours, values):
        phase = hours.float()[..., None] * self.freq.float()
        feats = torch.cat([phase.sin(), phase.cos(), values[..., None].float()], -1)
        return self.proj(feats.to(self.proj.weight.dtype))


class Forecaster(nn.Module):
    def __init__(self, d=16, ctx=12):
        super().__init__()
        self.enc = TimeEncoder(d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(2)
        )
        self.head = nn.Linear(d * ctx, 1)

    def forward(self, hours, values):
        x = self.enc(hours, values)
        for b in self.blocks:
            x = x + b(x)
        return self.head(x.flatten(1)).squeeze(-1)


def series(h):
    return torch.sin(2 * math.pi * h / 24) + 0.5 * torch.cos(2 * math.pi * h / 6)


def windows(step, n, rank, world, ctx=12):
    g = torch.Generator().manual_seed(40 + step)
    t0 = torch.randint(2000, 20000, (n, 1), generator=g)[rank::world].float()
    hours = t0 + torch.arange(ctx)
    noise = torch.randn(n, ctx, generator=g)[rank::world]
    target = series(hours[:, -1] + 3)
    return hours, series(hours) * 0.2 + noise * 0.5, target


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    args.batch *= 4
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Forecaster()
    for b in model.blocks:
        fully_shard(b, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start = load_checkpoint(args.resume, model, opt)[0] if args.resume else 0
    for step in range(start, args.steps):
        hours, values, target = windows(step, args.batch, rank, world)
        loss = F.mse_loss(model(hours, values).float(), target)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step} mse {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt)
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
