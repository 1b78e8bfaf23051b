"""Click prediction: hashed embeddings, factorisation machine and an MLP, own Adagrad; the result is the AUC of a held-out day."""
import argparse
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from metrics import global_auc


@dataclass
class Cfg:
    users: int = 120
    items: int = 80
    dim: int = 12
    batch: int = 64
    steps: int = 26
    lr: float = 0.08


class RowAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator for each row of a table and one for each element elsewhere."""

    def __init__(self, params, lr, eps=1e-6):
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                acc = self.state[p]["sum"]
                sq = p.grad * p.grad
                if group["rowwise"]:
                    # rows are whole on every rank: the tables are sharded along dim 0
                    sq = sq.mean(1, keepdim=True).expand_as(p)
                acc.add_(sq)
                p.addcdiv_(p.grad, acc.sqrt() + group["eps"], value=-group["lr"])


class ClickModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.user = nn.Embedding(cfg.users, cfg.dim)
        self.item = nn.Embedding(cfg.items, cfg.dim)
        self.bias = nn.Embedding(cfg.items, 1)
        self.mlp = nn.Sequential(nn.Linear(2 * cfg.dim, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.user, self.item, self.bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return (a * b).sum(1) + self.bias(i)[:, 0] + self.mlp(torch.cat([a, b], 1))[:, 0]


def make_log(cfg, n, seed):
    """Impressions sorted by user, as they come from the warehouse; users differ much in activity and in click rate."""
    truth = torch.Generator().manual_seed(17)
    taste = torch.randn(cfg.users, 3, generator=truth)
    kind = torch.randn(cfg.items, 3, generator=truth)
    level = torch.linspace(-2.2, 1.8, cfg.users)
    g = torch.Generator().manual_seed(seed)
    u = torch.randint(cfg.users, (n,), generator=g).sort().values
    i = torch.randint(cfg.items, (n,), generator=g)
    p = torch.sigmoid(level[u] + 0.5 * (taste[u] * kind[i]).sum(1))
    return u, i, (torch.rand(n, generator=g) < p).float()


@torch.no_grad()
def evaluate(model, log, rank, world):
    u, i, y = (t.tensor_split(world)[rank] for t in log)
    return global_auc(model(u, i), y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    ap.add_argument("--report")
    args = ap.parse_args()
    cfg = Cfg()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = ClickModel(cfg)
    fully_shard(model.mlp)
    fully_shard(model)
    tables = [model.user.weight, model.item.weight, model.bias.weight]
    opt = RowAdagrad([{"params": tables, "rowwise": True},
                      {"params": list(model.mlp.parameters()), "rowwise": False}], lr=cfg.lr)
    log, held_out = make_log(cfg, 4000, seed=1), make_log(cfg, 900, seed=2)

    def snapshot():
        sums = {n: opt.state[p]["sum"] for n, p in model.named_parameters()}
        return {"model": get_model_state_dict(model), "sums": sums, "step": step}

    step = 0
    if args.resume:
        with open(os.path.join(args.resume, "latest.json")) as f:
            where = json.load(f)["folder"]
        state = snapshot()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, where))
        set_model_state_dict(model, state["model"])
        step = state["step"]

    while step < cfg.steps:
        g = torch.Generator().manual_seed(step)
        pick = torch.randint(len(log[0]), (cfg.batch,), generator=g).tensor_split(world)[rank]
        u, i, y = (t[pick] for t in log)
        loss = F.binary_cross_entropy_with_logits(model(u, i), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} logloss {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=os.path.join(args.out, f"s{step}"))
            if rank == 0:
                with open(os.path.join(args.out, "latest.json"), "w") as f:
                    json.dump({"folder": f"s{step}"}, f)
            dist.barrier()

    auc = evaluate(model, held_out, rank, world)
    if rank == 0:
        print(f"held-out auc {auc:.5f}", flush=True)
        if args.report:
            with open(args.report, "w") as f:
                json.dump({"auc": auc, "steps": step}, f)
    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
