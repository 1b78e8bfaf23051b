"""GRU demand forecaster with early stopping on the validation error. The best model is what gets tested and shipped."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    epochs: int = 30
    steps_per_epoch: int = 2
    train_size: int = 24
    lr: float = 2e-2
    patience: int = 5
    seed: int = 4


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.cell = nn.GRUCell(2, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), self.cell.hidden_size)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(torch.relu(self.mid(h)))


def make_data(n, seed, length=8):
    g = torch.Generator().manual_seed(seed)
    level = torch.randn(n, 1, generator=g).repeat(1, length + 1)
    season = torch.sin(torch.arange(length + 1) * 0.9 + 6.28 * torch.rand(n, 1, generator=g))
    demand = level + season + 0.5 * torch.randn(n, length + 1, generator=g)
    promo = (torch.rand(n, length + 1, generator=g) < 0.2).float()
    demand = demand + 0.8 * promo
    return torch.stack([demand[:, :-1], promo[:, 1:]], -1), demand[:, -1]


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.best_epoch = 0
        self.weights = None

    def update(self, model, epoch, value):
        if value < self.best:
            self.best, self.best_epoch = value, epoch
            self.weights = {k: v.detach().clone() for k, v in get_model_state_dict(model).items()}

    def exhausted(self, epoch):
        return epoch - self.best_epoch >= self.patience


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    total = F.mse_loss(model(x[rank::world]).squeeze(-1), y[rank::world], reduction="sum")
    dist.all_reduce(total)
    return total.item() / len(x)


def save(path, model, opt, stopper, epoch):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "optim": o, "best_weights": stopper.weights, "epoch": epoch,
              "best": stopper.best, "best_epoch": stopper.best_epoch}, checkpoint_id=path)


def load(path, model, opt, stopper):
    m, o = get_state_dict(model, opt)
    weights = {k: torch.empty_like(v) for k, v in m.items()}
    state = {"model": m, "optim": o, "best_weights": weights, "epoch": 0, "best": 0.0, "best_epoch": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    stopper.weights, stopper.best, stopper.best_epoch = weights, state["best"], state["best_epoch"]
    return state["epoch"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(cfg.seed)
    model = Forecaster()
    fully_shard(model.cell)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    stopper = EarlyStopping(cfg.patience)
    train, val, test = make_data(cfg.train_size, 1), make_data(128, 2), make_data(256, 3)

    first = 0
    if args.resume:
        epochs = [int(d[5:]) for d in os.listdir(args.resume) if d.startswith("epoch")]
        first = load(os.path.join(args.resume, f"epoch{max(epochs)}"), model, opt, stopper)

    batch = cfg.train_size // cfg.steps_per_epoch
    for epoch in range(first + 1, cfg.epochs + 1):
        if stopper.exhausted(epoch - 1):
            break
        order = torch.randperm(cfg.train_size, generator=torch.Generator().manual_seed(cfg.seed + epoch))
        total = torch.zeros(())
        for ids in order.split(batch):
            ids = ids.chunk(world)[rank]
            loss = F.mse_loss(model(train[0][ids]).squeeze(-1), train[1][ids])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        val_mse = evaluate(model, *val, rank, world)
        stopper.update(model, epoch, val_mse)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / world / cfg.steps_per_epoch:.4f} val {val_mse:.4f}", flush=True)
        if args.save_every and epoch % args.save_every == 0:
            save(os.path.join(args.out, f"epoch{epoch}"), model, opt, stopper, epoch)

    set_model_state_dict(model, stopper.weights)
    val_mse, test_mse = evaluate(model, *val, rank, world), evaluate(model, *test, rank, world)
    if rank == 0:
        print(f"best epoch {stopper.best_epoch} recorded val {stopper.best:.4f}")
        print(f"restored model: val {val_mse:.4f} test {test_mse:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
