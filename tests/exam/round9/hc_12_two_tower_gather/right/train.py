"""Two-tower retrieval with in-batch negatives from all ranks. The gather has its own backward, the
loss of a rank is its share of the global sum, and the towers sum (not average) their gradients."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks. Every rank's loss uses all rows, so the gradients of all
    ranks are summed before each takes the part of its own rows."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Tower(nn.Module):
    def __init__(self, count, dim=24, out=16):
        super().__init__()
        self.table = nn.Embedding(count, dim)
        self.net = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, out))

    def forward(self, ids):
        return F.normalize(self.net(self.table(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, users, items):
        super().__init__()
        self.users, self.items = Tower(users), Tower(items)
        self.log_scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, u, i, log_q):
        eu, ei = self.users(u), self.items(i)
        all_items, all_ids, all_q = GatherRows.apply(ei), gather_plain(i), gather_plain(log_q)
        logits = self.log_scale.exp() * eu @ all_items.T - all_q
        row = torch.arange(len(u)) + len(u) * dist.get_rank()
        # the same item elsewhere in the batch is not a negative
        twin = (all_ids[None] == i[:, None]) & (torch.arange(len(all_ids))[None] != row[:, None])
        return F.cross_entropy(logits.masked_fill(twin, -1e4), row, reduction="sum")


def gather_plain(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def clicks(n=4000, users=200, items=150, seed=70):
    g = torch.Generator().manual_seed(seed)
    u = torch.randint(0, users, (n,), generator=g)
    i = (u * 3 // 4 + torch.randint(0, 6, (n,), generator=g)) % items
    popularity = torch.bincount(i, minlength=items).float() + 1
    return u, i, (popularity / popularity.sum()).log()


def epochs(n, size, start_step):
    """Endless row numbers of the global batches, from a given step on."""
    per, step = n // size, start_step
    while True:
        epoch, k = divmod(step, per)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
        yield order[k * size:(k + 1) * size]
        step += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=10)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(10)
    model = TwoTower(200, 150)
    for part in (model.users, model.items, model):
        fully_shard(part)
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=args.steps + 1, cycle_momentum=False)
    u, i, log_q = clicks()

    start = 0
    if args.resume:
        m, o = get_state_dict(model, optimizer)
        state = {"m": m, "o": o, "s": schedule.state_dict()}
        newest = max(os.listdir(args.resume))
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
        schedule.load_state_dict(state["s"])
        start = int(newest)

    rows = epochs(len(u), args.batch, start)
    for step in range(start + 1, args.steps + 1):
        idx = next(rows).chunk(world)[rank]
        loss = model(u[idx], i[idx], log_q[i[idx]]) / args.batch
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {total:.6f}", flush=True)
        if args.out and step % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            dcp.save({"m": m, "o": o, "s": schedule.state_dict()}, checkpoint_id=f"{args.out}/{step:05d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
