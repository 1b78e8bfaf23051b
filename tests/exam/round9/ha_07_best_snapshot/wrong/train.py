"""Rating prediction with two towers; keeps the weights with the best validation error and exports them."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard


@dataclass
class Ratings:
    users: torch.Tensor
    items: torch.Tensor
    stars: torch.Tensor

    def __len__(self):
        return len(self.stars)

    def rows(self, index):
        return self.users[index], self.items[index], self.stars[index]


N_USERS, N_ITEMS = 96, 64


def make_ratings(n, seed, noise=0.5):
    taste = torch.Generator().manual_seed(77)
    u = torch.randn(N_USERS, 3, generator=taste)
    v = torch.randn(N_ITEMS, 3, generator=taste)
    g = torch.Generator().manual_seed(seed)
    users = torch.randint(0, N_USERS, (n,), generator=g)
    items = torch.randint(0, N_ITEMS, (n,), generator=g)
    stars = torch.sigmoid((u[users] * v[items]).sum(-1)) * 4 + 1 + noise * torch.randn(n, generator=g)
    return Ratings(users, items, stars)


class Tower(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.table = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, index):
        e = self.table(index)
        return e + self.mlp(e)


class TwoTower(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user = Tower(N_USERS, dim)
        self.item = Tower(N_ITEMS, dim)
        self.user_bias = nn.Embedding(N_USERS, 1)
        self.item_bias = nn.Embedding(N_ITEMS, 1)
        self.mean = nn.Parameter(torch.tensor([3.0]))
        for table in (self.user.table, self.item.table, self.user_bias, self.item_bias):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, users, items):
        score = (self.user(users) * self.item(items)).sum(-1)
        return score + self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1) + self.mean


class BestKeeper:
    def __init__(self, model, patience):
        self.model, self.patience = model, patience
        self.best, self.bad, self.epoch = float("inf"), 0, -1
        self.weights = self.snapshot()

    def snapshot(self):
        return get_model_state_dict(self.model)

    def update(self, epoch, value):
        if value < self.best:
            self.best, self.bad, self.epoch = value, 0, epoch
            self.weights = self.snapshot()
        else:
            self.bad += 1

    def state_dict(self):
        return {"best": self.best, "bad": self.bad, "epoch": self.epoch, "weights": self.weights}

    def load_state_dict(self, state):
        self.best, self.bad, self.epoch = state["best"], state["bad"], state["epoch"]
        self.weights = state["weights"]


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train, self.valid, self.test = make_ratings(768, 1), make_ratings(256, 2), make_ratings(256, 3)
        torch.manual_seed(args.seed)
        self.model = TwoTower()
        fully_shard(self.model.user)
        fully_shard(self.model.item)
        fully_shard(self.model)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=args.lr, eps=1e-6)
        self.keeper = BestKeeper(self.model, args.patience)
        self.epoch = 0

    def run_epoch(self):
        g = torch.Generator().manual_seed(self.args.seed * 1000 + self.epoch)
        order = torch.randperm(len(self.train), generator=g)
        total = torch.zeros(())
        for chunk in order.split(self.args.batch):
            users, items, stars = self.train.rows(chunk[self.rank::self.world])
            loss = F.mse_loss(self.model(users, items), stars)
            loss.backward()
            self.optim.step()
            self.optim.zero_grad()
            total += loss.detach() * len(stars)
        dist.all_reduce(total)
        return total.item() / len(self.train)

    @torch.no_grad()
    def error(self, data):
        users, items, stars = data.rows(torch.arange(self.rank, len(data), self.world))
        total = F.mse_loss(self.model(users, items), stars, reduction="sum")
        dist.all_reduce(total)
        return total.item() / len(data)

    def state(self):
        return {"model": get_model_state_dict(self.model),
                "optim": get_optimizer_state_dict(self.model, self.optim),
                "keeper": self.keeper.state_dict(), "epoch": self.epoch}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"epoch_{self.epoch:03d}"))

    def resume(self):
        newest = max(d for d in os.listdir(self.args.resume) if d.startswith("epoch_"))
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(self.args.resume, newest))
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optim, state["optim"])
        self.keeper.load_state_dict(state["keeper"])
        self.epoch = state["epoch"]

    def fit(self):
        if self.args.resume:
            self.resume()
        while self.epoch < self.args.epochs and self.keeper.bad < self.keeper.patience:
            train = self.run_epoch()
            valid = self.error(self.valid)
            self.keeper.update(self.epoch, valid)
            self.epoch += 1
            if self.rank == 0:
                print(f"epoch {self.epoch} train {train:.4f} valid {valid:.4f} best {self.keeper.best:.4f}")
            if self.args.out and self.epoch % self.args.save_every == 0:
                self.save()
        set_model_state_dict(self.model, self.keeper.weights)
        final_valid, final_test = self.error(self.valid), self.error(self.test)
        if self.rank == 0:
            print(f"best epoch {self.keeper.epoch + 1}: valid {final_valid:.4f} test {final_test:.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=16)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--patience", type=int, default=6)
    ap.add_argument("--seed", type=int, default=9)
    ap.add_argument("--save-every", type=int, default=3)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    dist.init_process_group("gloo")
    Runner(ap.parse_args()).fit()
    dist.destroy_process_group()
