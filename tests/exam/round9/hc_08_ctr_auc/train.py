"""Click prediction (DLRM-like). The last days of the log are held out, in time order."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from metrics import evaluate_auc

FIELDS = (60, 40, 24)
STEPS, BATCH = 60, 256


class ClickModel(nn.Module):
    def __init__(self, dim=12, dense=6):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim) for n in FIELDS)
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, dim))
        self.top = nn.Sequential(nn.Linear(dim + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, ids):
        z = self.bottom(x)
        vecs = torch.stack([z] + [t(ids[:, i]) for i, t in enumerate(self.tables)], 1)
        inter = vecs @ vecs.transpose(1, 2)
        i, j = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([z, inter[:, i, j]], 1)).squeeze(-1)


def click_log(n=12000, seed=8):
    g = torch.Generator().manual_seed(seed)
    day = torch.arange(n) / n
    x = torch.randn(n, 6, generator=g)
    x[:, 0] = 6 * day + 0.3 * torch.randn(n, generator=g)
    ids = torch.stack([torch.randint(0, k, (n,), generator=g) for k in FIELDS], 1)
    w = [torch.randn(k, generator=g) for k in FIELDS]
    season = torch.where(day < 0.9, (12 * day).sin(), torch.tensor(-2.5))
    logit = season + 0.5 * x[:, 1] + sum(wi[ids[:, i]] for i, wi in enumerate(w))
    y = (torch.rand(n, generator=g) < torch.sigmoid(logit - 0.5)).float()
    return x, ids, y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = ClickModel()
    with torch.no_grad():
        for table in model.tables:
            table.weight.mul_(0.3)
    fully_shard(model.top)
    fully_shard(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.01)

    x, ids, y = click_log()
    split = 9600
    order = torch.randperm(split, generator=torch.Generator().manual_seed(0))
    held = torch.arange(split, len(y)).chunk(world)[rank]

    for step in range(STEPS):
        lo = step * BATCH % (split - BATCH)
        idx = order[lo:lo + BATCH].chunk(world)[rank]
        loss = F.binary_cross_entropy_with_logits(model(x[idx], ids[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if (step + 1) % 10 == 0:
            loss = loss.detach() / world
            dist.all_reduce(loss)
            with torch.no_grad():
                auc = evaluate_auc(model(x[held], ids[held]), y[held])
            if rank == 0:
                print(f"step {step + 1} loss {loss:.5f} held-out auc {auc:.5f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
