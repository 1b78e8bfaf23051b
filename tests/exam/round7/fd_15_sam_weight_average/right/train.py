"""Credit table: classifier trained with SAM in cycles; the mean of the cycle ends is what is kept. The hidden layer's
normalisation is estimated anew for the averaged weights. Mixup and dropout are drawn for the global batch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from averaging import CycleAverage
from running_norm import GlobalFeatureNorm
from sharpness import SAM

COLS, D, BATCH, CYCLE = 16, 40, 96, 9
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Half(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.a, self.b = nn.Linear(d_in, d_out), nn.Linear(d_out, d_out)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = Half(COLS, D)
        self.mid_norm = GlobalFeatureNorm(D)
        self.high = Half(D, D)
        self.cls = nn.Linear(D, 2)

    def forward(self, x, keep=None, until_norm=False):
        h = self.low(x)
        if until_norm:
            return h
        h = self.mid_norm(h)
        if keep is not None:
            h = h * keep / 0.9
        return self.cls(F.relu(self.high(h)))


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, COLS, generator=g) * torch.linspace(0.3, 2, COLS)
    score = x[:, 0] * x[:, 1] * 3 + x[:, 2].abs() - x[:, 3] + 0.5 * torch.randn(n, generator=g)
    return x, (score > 0.5).long()


def lr_at(step):
    return 0.05 * (1 - 0.9 * (step % CYCLE) / (CYCLE - 1))


def reestimate(model, x):
    with torch.no_grad():
        h = model(x, until_norm=True)
    model.reshard()
    model.mid_norm.estimate(h)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cycles", type=int, default=4)
    p.add_argument("--save", help="folder")
    p.add_argument("--save-period", type=int, default=11)
    p.add_argument("--resume", help="folder")
    p.add_argument("--kept-model")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def part(t):
        return t.chunk(world)[rank]

    x, y = table(768, 1)
    torch.manual_seed(12)
    model = Classifier()
    fully_shard(model.low)
    fully_shard(model.high)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sam, average = SAM(model, base), CycleAverage(model)
    g = torch.Generator().manual_seed(77)
    step = 0
    if a.resume:
        files = sorted(os.listdir(a.resume), key=lambda f: int(f.split(".")[0]))
        st = torch.load(os.path.join(a.resume, files[-1]), weights_only=True)
        set_state_dict(model, base, model_state_dict=st["model"], optim_state_dict=st["optim"], options=FULL)
        for n, t in average.mean.items():
            full = st["average"]["mean"][n]
            t.copy_(distribute_tensor(full, t.device_mesh, t.placements) if isinstance(t, DTensor) else full)
        average.n.copy_(st["average"]["n"])
        g.set_state(st["rng"])
        step = st["step"]
    else:
        reestimate(model, part(x))

    while step < a.cycles * CYCLE:
        if step % CYCLE == 0 and step:
            reestimate(model, part(x))
        for group in base.param_groups:
            group["lr"] = lr_at(step)
        rows = torch.randint(0, len(x), (BATCH,), generator=g)
        other = rows[torch.randperm(BATCH, generator=g)]
        lam = 1 - 0.3 * torch.rand(BATCH, generator=g)
        keep = (torch.rand(BATCH, D, generator=g) < 0.9).float()
        rows, other, lam, keep = part(rows), part(other), part(lam), part(keep)
        mixed = lam[:, None] * x[rows] + (1 - lam[:, None]) * x[other]

        def loss_fn():
            logits = model(mixed, keep)
            ce = [F.cross_entropy(logits, y[r], reduction="none") for r in (rows, other)]
            return (lam * ce[0] + (1 - lam) * ce[1]).mean()

        loss = loss_fn()
        loss.backward()
        sam.climb()
        loss_fn().backward()
        sam.descend()
        step += 1

        if step % CYCLE == 0:
            average.add()
            l = loss.detach()
            dist.all_reduce(l)
            if rank == 0:
                print(f"cycle {step // CYCLE} loss {l.item() / world:.4f}")
        if a.save and step % a.save_period == 0:
            m, o = get_state_dict(model, base, options=FULL)
            mean = {n: t.full_tensor() for n, t in average.mean.items()}
            if rank == 0:
                torch.save({"model": m, "optim": o, "average": {"mean": mean, "n": average.n}, "rng": g.get_state(),
                            "step": step}, os.path.join(a.save, f"{step}.pt"))
            dist.barrier()

    average.apply()
    reestimate(model, part(x))
    xt, yt = table(1024, 2)
    with torch.no_grad():
        right = (model(part(xt)).argmax(-1) == part(yt)).float().sum()
    dist.all_reduce(right)
    m, _ = get_state_dict(model, base, options=FULL)
    if rank == 0:
        print(f"accuracy of the averaged model {right.item() / len(yt):.4f}")
        if a.kept_model:
            torch.save(m, a.kept_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
