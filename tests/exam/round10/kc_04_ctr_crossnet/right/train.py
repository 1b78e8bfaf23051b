import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

CARDINALITIES = [50, 30, 20, 8]
N_DENSE = 6


class CrossLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x0, x):
        return x0 * self.linear(x) + x


class CTRModel(nn.Module):
    def __init__(self, emb=8, crosses=2, hidden=48):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(c, emb) for c in CARDINALITIES)
        dim = emb * len(CARDINALITIES) + N_DENSE
        self.crosses = nn.ModuleList(CrossLayer(dim) for _ in range(crosses))
        self.deep = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(dim + hidden, 1)

    def forward(self, cats, dense):
        x0 = torch.cat([t(cats[:, i]) for i, t in enumerate(self.tables)] + [dense], dim=1)
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        return self.out(torch.cat([x, self.deep(x0)], dim=1))


class ClickLog:
    def __init__(self, rows, seed):
        g = torch.Generator().manual_seed(seed)
        self.cats = torch.stack([torch.randint(0, c, (rows,), generator=g) for c in CARDINALITIES], dim=1)
        self.dense = torch.randn(rows, N_DENSE, generator=g)
        logit = torch.full((rows,), -1.0)
        for i, c in enumerate(CARDINALITIES):
            logit += torch.randn(c, generator=g)[self.cats[:, i]] * 0.8
        logit += self.dense[:, 0] * self.dense[:, 1]
        self.click = (torch.rand(rows, generator=g) < torch.sigmoid(logit)).float()

    def __len__(self):
        return len(self.click)


def batches(log, batch_size, epoch):
    order = torch.randperm(len(log), generator=torch.Generator().manual_seed(100 + epoch))
    for i in range(0, len(log) - batch_size + 1, batch_size):
        yield order[i : i + batch_size]


def save(folder, step, model, optim):
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optim), "step": step}
    dcp.save(state, checkpoint_id=os.path.join(folder, f"{step:06d}"))


def load(folder, model, optim):
    newest = sorted(d for d in os.listdir(folder) if d.isdigit())[-1]
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optim), "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(folder, newest))
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optim, state["optim"])
    return state["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ctr")
    p.add_argument("--resume", default=None)
    a = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = ClickLog(2048, seed=21)

    torch.manual_seed(8)
    model = CTRModel()
    for layer in [*model.crosses, model.deep]:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=a.lr, betas=(0.9, 0.99))

    done = load(a.resume, model, optim) if a.resume else 0
    step = 0
    for epoch in range(a.epochs):
        for rows in batches(log, a.batch_size, epoch):
            step += 1
            if step <= done:
                continue
            mine = rows.chunk(world)[rank]
            logits = model(log.cats[mine], log.dense[mine]).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits, log.click[mine])
            optim.zero_grad()
            loss.backward()
            optim.step()
            if step % 8 == 0:
                mean = loss.detach() / world
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"epoch {epoch} step {step} logloss {mean.item():.4f}", flush=True)
            if a.save_every and step % a.save_every == 0:
                save(a.out, step, model, optim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
