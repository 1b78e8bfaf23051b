"""DeepSurv-style Cox regression on synthetic registry data.

The partial likelihood of a patient needs the scores of everybody still at risk, so the loss is taken over the
whole batch: scores are gathered and every rank evaluates the same likelihood."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PATIENTS, COVARIATES, WIDTH, BATCH, STEPS, SEED = 320, 12, 32, 64, 42, 5


def registry():
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(PATIENTS, COVARIATES, generator=g)
    hazard = 1.8 * x[:, 0] - 1.5 * x[:, 1] + 1.2 * x[:, 2] * x[:, 3]
    time = -torch.log(torch.rand(PATIENTS, generator=g).clamp_min(1e-6)) * torch.exp(-hazard)
    censor = -torch.log(torch.rand(PATIENTS, generator=g).clamp_min(1e-6)) * 2.0
    return x, torch.minimum(time, censor), (time <= censor).float()


class GatherScores(torch.autograd.Function):
    """All ranks' scores, in rank order. Every rank evaluates the same function of them, hence holds the same
    gradient; its own part of it, times the world size that the gradient average divides by, needs no traffic."""

    @staticmethod
    def forward(ctx, local):
        ctx.n = local.numel()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        lo = dist.get_rank() * ctx.n
        return grad[lo : lo + ctx.n] * dist.get_world_size()


def cox_loss(score, time, event):
    order = torch.argsort(time, descending=True)
    score, event = score[order], event[order]
    log_risk = torch.logcumsumexp(score, 0)
    return -((score - log_risk) * event).sum() / event.sum().clamp_min(1.0)


class RiskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(COVARIATES, WIDTH), nn.LayerNorm(WIDTH), nn.SELU())
        self.mid = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SELU())
        self.out = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x):
        return self.out(self.mid(self.inp(x)))


def rows_of(step):
    per_epoch = PATIENTS // BATCH
    g = torch.Generator().manual_seed(SEED + 1 + step // per_epoch)
    k = step % per_epoch
    return torch.randperm(PATIENTS, generator=g)[k * BATCH : (k + 1) * BATCH]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", type=pathlib.Path, help="folder for checkpoints")
    ap.add_argument("--every", type=int, default=10)
    ap.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --ckpt")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(SEED)
    net = RiskNet()
    for part in (net.inp, net.mid):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    first = 0
    if a.resume:
        newest = max(a.ckpt.glob("s*"), key=lambda p: int(p.name[1:]))
        m, o = get_state_dict(net, opt)
        bag = {"net": m, "opt": o}
        dcp.load(bag, checkpoint_id=str(newest))
        set_state_dict(net, opt, model_state_dict=bag["net"], optim_state_dict=bag["opt"])
        first = int(newest.name[1:])

    x, time, event = registry()
    mine = BATCH // world
    recent = []
    for step in range(first, STEPS):
        rows = rows_of(step)
        local = rows[rank * mine : (rank + 1) * mine]
        scores = GatherScores.apply(net(x[local]).squeeze(-1))
        loss = cox_loss(scores, time[rows], event[rows])
        loss.backward()
        opt.step()
        opt.zero_grad()
        recent = (recent + [loss.item()])[-5:]
        if rank == 0 and step % 5 == 1:
            print(f"{step:3d} loss {sum(recent) / len(recent):.4f}", flush=True)
        if a.ckpt and not a.resume and (step + 1) % a.every == 0:
            m, o = get_state_dict(net, opt)
            dcp.save({"net": m, "opt": o}, checkpoint_id=str(a.ckpt / f"s{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
