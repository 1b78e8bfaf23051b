"""Rating prediction with early stopping; the best weights are kept in memory and exported at the end."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

USERS, ITEMS = 40, 32


class Recommender(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.body = nn.Sequential(nn.Linear(2 * dim, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.top = nn.Linear(48, 1)

    def forward(self, user, item):
        x = torch.cat([self.user(user), self.item(item)], dim=-1)
        return self.top(self.body(x)).squeeze(-1)


def ratings():
    g = torch.Generator().manual_seed(13)
    u = torch.randint(0, USERS, (480,), generator=g)
    i = torch.randint(0, ITEMS, (480,), generator=g)
    pu, qi = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    r = 0.6 * (pu[u] * qi[i]).sum(1) + torch.randn(USERS, generator=g)[u] + 0.7 * torch.randn(480, generator=g)
    return (u[:320], i[:320], r[:320]), (u[320:], i[320:], r[320:])


@torch.no_grad()
def rmse(model, data, rank, world):
    u, i, r = (t[rank::world] for t in data)
    s = torch.stack([(model(u, i) - r).pow(2).sum(), torch.tensor(float(len(r)))])
    dist.all_reduce(s)
    return (s[0] / s[1]).sqrt().item()


class EarlyStopping:
    """Remembers the weights with the lowest validation error."""

    def __init__(self, patience):
        self.patience, self.bad = patience, 0
        self.best, self.best_step, self.best_state = float("inf"), -1, None

    def update(self, step, value, model):
        if value < self.best:
            self.best, self.best_step, self.bad = value, step, 0
            self.best_state = {k: v.detach() for k, v in model.state_dict().items()}
        else:
            self.bad += 1
        return self.bad >= self.patience


def export(model, path, rank):
    weights = {}
    for name, value in model.state_dict().items():
        weights[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    if rank == 0:
        torch.save(weights, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=80)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--patience", type=int, default=8, help="evaluations without gain")
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--export", default=None, help="file for the best weights")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(4)
    model = Recommender()
    fully_shard(model.body)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)
    train, valid = ratings()
    stopper = EarlyStopping(args.patience)

    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        pick = torch.randperm(len(train[0]), generator=g)[: args.batch][rank::world]
        u, i, r = (t[pick] for t in train)
        loss = F.mse_loss(model(u, i), r)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if (step + 1) % args.eval_every:
            continue
        value = rmse(model, valid, rank, world)
        stop = stopper.update(step, value, model)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step:3d} loss {shown / world:.4f} valid rmse {value:.4f} best {stopper.best:.4f}", flush=True)
        if stop:
            break

    model.load_state_dict(stopper.best_state)
    if rank == 0:
        print(f"restored the weights of step {stopper.best_step} (rmse {stopper.best:.4f})", flush=True)
    if args.export:
        export(model, args.export, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
