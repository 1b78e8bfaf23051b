"""Matrix factorisation with side features; embedding tables are split by columns, so no rank holds only popular rows.

The tables use row-wise Adagrad: one accumulator per row, fed with the mean square of the row's gradient.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

USERS, ITEMS, WIDTH = 60, 44, 32


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, WIDTH)
        self.item = nn.Embedding(ITEMS, WIDTH)
        self.side = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, 1)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user, item, context):
        return self.head(self.user(user) * (self.item(item) + self.side(context)))


class RowwiseAdagrad(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, eps=1e-8):
        super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, weight = p.grad, p
                split_rows = isinstance(p, DTensor) and p.placements[0].is_shard(1)
                if isinstance(p, DTensor):
                    grad, weight = grad.to_local(), p.to_local()
                state = self.state[p]
                if "rows" not in state:
                    state["rows"] = torch.zeros(weight.shape[0])
                square = grad.square().sum(1)
                columns = weight.shape[1]
                if split_rows:
                    dist.all_reduce(square, group=p.device_mesh.get_group())
                    columns = p.shape[1]
                state["rows"] += square / columns
                weight.addcdiv_(grad, (state["rows"].sqrt() + group["eps"])[:, None].expand_as(grad), value=-group["lr"])


def ratings(n, seed):
    g = torch.Generator().manual_seed(seed)
    truth = torch.Generator().manual_seed(99)
    pu, pi = torch.randn(USERS, 4, generator=truth), torch.randn(ITEMS, 4, generator=truth)
    user = (USERS * torch.rand(n, generator=g).square()).long()
    item = (ITEMS * torch.rand(n, generator=g).square()).long()
    context = torch.randn(n, 4, generator=g)
    rating = (pu[user] * (pi[item] + 0.5 * context)).sum(1) / 2
    return user, item, context, rating + 0.1 * torch.randn(n, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--table-lr", type=float, default=0.15)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(13)
    model = Factors()
    wide = {model.user.weight, model.item.weight}
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p in wide else Shard(0))
    tables = [model.user.weight, model.item.weight]
    dense = [p for n, p in model.named_parameters() if n.startswith(("side", "head"))]
    optims = [RowwiseAdagrad(tables, lr=args.table_lr), torch.optim.Adam(dense, lr=0.01)]
    data = ratings(2048, seed=40)

    step = 0
    if args.resume:
        saved = torch.load(os.path.join(args.resume, f"shard-{rank}-of-{world}.pt"), weights_only=False)
        model.load_state_dict(saved["model"])
        for o, s in zip(optims, saved["optims"]):
            o.load_state_dict(s)
        step = saved["step"]

    while step < args.steps:
        rows = torch.randint(len(data[0]), (args.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        user, item, context, rating = (t[rows] for t in data)
        loss = (model(user, item, context)[:, 0] - rating).square().mean()
        loss.backward()
        for o in optims:
            o.step()
            o.zero_grad()
        step += 1
        if step % 6 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "optims": [o.state_dict() for o in optims], "step": step},
                       os.path.join(args.out, f"shard-{rank}-of-{world}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
