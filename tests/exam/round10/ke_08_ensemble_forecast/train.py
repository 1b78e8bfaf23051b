"""Deep ensemble for forecasting: the members are stacked in one tensor per layer, sharded over the members."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MEMBERS, WINDOW, HORIZON, HIDDEN = 8, 16, 4, 24


class StackedLinear(nn.Module):
    """One linear layer for every member."""

    def __init__(self, members, inp, out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inp, out))
        self.bias = nn.Parameter(torch.empty(members, out))

    def forward(self, x):
        return torch.einsum("mbi,mio->mbo", x, self.weight) + self.bias[:, None]

    @torch.no_grad()
    def init_weights(self, generator):
        bound = self.weight.shape[1] ** -0.5
        for p in (self.weight, self.bias):
            if isinstance(p, DTensor):
                full = torch.empty(p.shape).uniform_(-bound, bound, generator=generator)
                world, rank = p.device_mesh.size(), p.device_mesh.get_local_rank()
                local = p.to_local()
                if local.numel():
                    local.copy_(full.chunk(world)[rank])
            else:
                p.uniform_(-bound, bound, generator=generator)


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                StackedLinear(MEMBERS, WINDOW, HIDDEN),
                StackedLinear(MEMBERS, HIDDEN, HIDDEN),
                StackedLinear(MEMBERS, HIDDEN, 2 * HORIZON),
            ]
        )

    def forward(self, x):
        h = x.unsqueeze(0).expand(MEMBERS, -1, -1)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i < len(self.layers) - 1:
                h = torch.tanh(h)
        mean, raw = h.chunk(2, dim=-1)
        return mean * 1.0, F.softplus(raw) + 1e-3


def series(step, n):
    g = torch.Generator().manual_seed(600 + step)
    t = torch.arange(WINDOW + HORIZON)
    freq = 0.2 + 0.6 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    s = torch.sin(freq * t + phase) + 0.3 * torch.sin(2.1 * freq * t) + 0.1 * torch.randn(n, len(t), generator=g)
    return s[:, :WINDOW], s[:, WINDOW:]


def nll(mean, var, y):
    return 0.5 * (var.log() + (y - mean) ** 2 / var).mean()


@torch.no_grad()
def report(model):
    x, y = series(-1, 64)
    mean, var = model(x)
    spread = mean.std(0).mean().item()
    mix_mean = mean.mean(0)
    mix_var = (var + mean**2).mean(0) - mix_mean**2
    return nll(mix_mean, mix_var, y).item(), spread


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    with torch.device("meta"):
        model = Ensemble()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(13)
    for layer in model.layers:
        layer.init_weights(generator)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)

    start = 0
    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        x, y = (t.chunk(world)[rank] for t in series(step, 32))
        mean, var = model(x)
        # sum over members, so that each one is trained as it would be alone
        loss = nll(mean, var, y.expand_as(mean)) * MEMBERS
        loss.backward()
        optim.step()
        optim.zero_grad()
        done = step + 1
        if done % 10 == 0:
            score, spread = report(model)
            if rank == 0:
                print(f"step {done} loss {loss.item() / MEMBERS:.4f} ensemble nll {score:.4f} spread {spread:.4f}", flush=True)
        if args.save_every and done % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": done}, checkpoint_id=os.path.join(args.out, f"{done:06d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
