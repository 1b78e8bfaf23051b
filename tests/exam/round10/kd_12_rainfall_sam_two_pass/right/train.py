"""Next-day rainfall (rain or not, and how much) from station histories, trained with adaptive SAM and tail weight averaging."""
import argparse
import contextlib
import os
import pickle

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

DAYS, FEATURES, CONTEXT = 300, 3, 14


def climate(n_stations=12, seed=41):
    g = torch.Generator().manual_seed(seed)
    pressure = torch.zeros(n_stations, DAYS)
    shock = torch.randn(n_stations, DAYS, generator=g) * 0.5 + torch.randn(1, DAYS, generator=g) * 0.5
    for t in range(1, DAYS):
        pressure[:, t] = 0.8 * pressure[:, t - 1] + shock[:, t]
    humid = -1.2 * pressure + 0.3 * torch.randn(n_stations, DAYS, generator=g)
    wet = (torch.rand(n_stations, DAYS, generator=g) < torch.sigmoid(3 * humid)).float()
    amount = wet * (0.5 + F.softplus(humid + 0.2 * torch.randn(n_stations, DAYS, generator=g)))
    return torch.stack([pressure, humid, torch.log1p(amount)], -1), wet, amount


class CausalConv(nn.Module):
    def __init__(self, c_in, c_out, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(c_in, c_out, 3, dilation=dilation)

    def forward(self, x):
        return F.gelu(self.conv(F.pad(x, (self.pad, 0))))


class RainNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.convs = nn.ModuleList([CausalConv(FEATURES, width, 1), CausalConv(width, width, 2), CausalConv(width, width, 4)])
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = x.transpose(1, 2)
        for c in self.convs:
            x = c(x)
        return self.head(x[..., -1])


def rain_loss(out, wet, amount):
    """Two-part (hurdle) loss: occurrence, and the size on wet days; averaged over all days of the batch."""
    occurrence = F.binary_cross_entropy_with_logits(out[:, 0], wet)
    size = (wet * (out[:, 1] - amount.clamp(min=1e-3).log()).square()).mean()
    return occurrence + 0.5 * size


class AdaptiveSAM:
    """ASAM: climb to |w|-scaled worst neighbour of the weights, take the gradient there, step from the original weights."""

    def __init__(self, model, base, rho=0.3):
        self.model, self.base, self.rho = model, base, rho

    @torch.no_grad()
    def _global_norm(self, tensors):
        local = sum((t.to_local() if isinstance(t, DTensor) else t).double().square().sum() for t in tensors)
        if any(isinstance(t, DTensor) for t in tensors):
            dist.all_reduce(local)
        return local.sqrt().item()

    @contextlib.contextmanager
    def perturbed(self):
        params = [p for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            size = [p.abs() + 0.01 for p in params]
            norm = self._global_norm([s * p.grad for s, p in zip(size, params)])
            backup = [p.detach().clone() for p in params]
            for p, s in zip(params, size):
                p.addcmul_(s * s, p.grad, value=self.rho / (norm + 1e-12))
        self.base.zero_grad()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, b in zip(params, backup):
                    p.copy_(b)

    def step(self, closure):
        loss = closure()
        with self.perturbed():
            closure()
        self.base.step()
        self.base.zero_grad()
        return loss


class TailAverage:
    """Plain mean of the weights from a given step on."""

    def __init__(self, model, begin):
        self.model, self.begin, self.count = model, begin, 0
        self.mean = [torch.zeros_like(p.detach()) for p in model.parameters()]

    @torch.no_grad()
    def update(self, step):
        if step < self.begin:
            return
        self.count += 1
        for m, p in zip(self.mean, self.model.parameters()):
            m.add_(p - m, alpha=1 / self.count)

    @torch.no_grad()
    def swap_in(self):
        for m, p in zip(self.mean, self.model.parameters()):
            p.copy_(m)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def pack(model, opt, tail, step):
    """Numpy arrays of this rank's shards, for pickle."""
    momenta = [opt.state[p].get("momentum_buffer") for p in model.parameters()]
    return {"step": step, "tail_count": tail.count,
            "weights": [local(p.detach()).numpy().copy() for p in model.parameters()],
            "momenta": [None if m is None else local(m).numpy().copy() for m in momenta],
            "tail": [local(m).numpy().copy() for m in tail.mean]}


@torch.no_grad()
def unpack(state, model, opt, tail):
    for p, w, m, mean, t in zip(model.parameters(), state["weights"], state["momenta"], tail.mean, state["tail"]):
        local(p.detach()).copy_(torch.from_numpy(w))
        local(mean).copy_(torch.from_numpy(t))
        if m is not None:
            buf = torch.zeros_like(p.detach())
            local(buf).copy_(torch.from_numpy(m))
            opt.state[p]["momentum_buffer"] = buf
    tail.count = state["tail_count"]
    return state["step"]


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
    torch.manual_seed(3)
    data, wet, amount = climate()
    model = RainNet()
    for c in model.convs:
        fully_shard(c)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sam = AdaptiveSAM(model, base)
    tail = TailAverage(model, begin=18)

    def batch(step):
        g = torch.Generator().manual_seed(60 + step)
        s = torch.randint(0, data.shape[0], (48,), generator=g).chunk(world)[rank]
        t = torch.randint(CONTEXT, 240, (48,), generator=g).chunk(world)[rank]
        x = torch.stack([data[i, j - CONTEXT:j] for i, j in zip(s, t)])
        return x, wet[s, t], amount[s, t]

    step = 0
    if args.resume:
        names = [n for n in os.listdir(args.resume) if n.startswith(f"rank{rank}_step")]
        with open(os.path.join(args.resume, max(names)), "rb") as f:
            step = unpack(pickle.load(f), model, base, tail)

    while step < args.steps:
        x, w, a = batch(step)

        def closure():
            loss = rain_loss(model(x), w, a)
            loss.backward()
            return loss.detach()

        loss = sam.step(closure).clone()
        step += 1
        tail.update(step)
        dist.all_reduce(loss)
        if rank == 0 and (step % 6 == 0 or step == 1):
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            with open(os.path.join(args.out, f"rank{rank}_step{step:05d}.pkl"), "wb") as f:
                pickle.dump(pack(model, base, tail, step), f)
            dist.barrier()

    tail.swap_in()
    with torch.no_grad():
        t = torch.arange(241, DAYS)
        x = torch.stack([data[i, j - CONTEXT:j] for i in range(len(data)) for j in t])
        brier = (model(x)[:, 0].sigmoid() - wet[:, 241:].flatten()).square().mean()
    if rank == 0:
        print(f"averaged weights of {tail.count} steps: Brier score {brier.item():.4f}", flush=True)
    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
