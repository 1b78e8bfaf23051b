import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from app_state import AppState, CheckpointManager
from graph import Communities


class GCNLayer(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.neigh = nn.Linear(cin, cout)
        self.self_loop = nn.Linear(cin, cout, bias=False)

    def forward(self, x, adj):
        return self.neigh(adj @ x) + self.self_loop(x)


class GCN(nn.Module):
    def __init__(self, dim, hidden, classes):
        super().__init__()
        self.first = GCNLayer(dim, hidden)
        self.second = GCNLayer(hidden, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x, adj):
        x = F.elu(self.first(x, adj))
        x = x + F.elu(self.second(x, adj))
        return self.head(x)


def build(cfg):
    torch.manual_seed(cfg.seed)
    model = GCN(16, cfg.hidden, 5)
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.99), weight_decay=1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=cfg.steps, power=1.0)
    return model, optimizer, scheduler


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    graph = Communities()
    model, optimizer, scheduler = build(cfg)
    app = AppState(model, optimizer, scheduler)
    if cfg.resume:
        CheckpointManager(cfg.resume).restore(app)
        if rank == 0:
            print(f"resumed at step {app.step}", flush=True)
    manager = CheckpointManager(cfg.out)

    while app.step < cfg.steps:
        seeds = graph.seeds(app.step, cfg.batch).chunk(world)[rank]
        logits = model(graph.feat, graph.adj)[seeds]
        loss = F.cross_entropy(logits, graph.label[seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        app.step += 1
        if app.step % 5 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {app.step} loss {mean.item() / world:.6f}", flush=True)
        if cfg.save_every and app.step % cfg.save_every == 0:
            manager.save(app)

    with torch.no_grad():
        logits = model(graph.feat, graph.adj)[graph.test_idx]
        test = F.cross_entropy(logits, graph.label[graph.test_idx])
    if rank == 0:
        print(f"test loss {test.item():.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume")
    cfg = parser.parse_args()
    dist.init_process_group("gloo")
    train(cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
