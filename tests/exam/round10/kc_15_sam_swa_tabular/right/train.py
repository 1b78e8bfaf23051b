import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from sam import SAM
from swa import ShardedSWA


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.b(F.relu(self.a(self.norm(x))))


class TabularResNet(nn.Module):
    def __init__(self, columns, classes, width=20, depth=2):
        super().__init__()
        self.stem = nn.Linear(columns, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def table(rows, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 9, generator=g)
    score = torch.stack([x[:, 0] * x[:, 1], x[:, 2] + x[:, 3].abs() - 0.8, torch.cos(2 * x[:, 4])], dim=1)
    return x, (score + 0.4 * torch.randn(rows, 3, generator=g)).argmax(1)


@torch.no_grad()
def evaluate(model, x, y):
    """Sum over this rank's rows, then over the ranks; the rows need not divide evenly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(len(x)).tensor_split(world)[rank]
    logits = model(x[rows])
    sums = torch.stack(
        [F.cross_entropy(logits, y[rows], reduction="sum").double(), (logits.argmax(1) == y[rows]).double().sum()]
    )
    dist.all_reduce(sums)
    return (sums / len(x)).tolist()


def learning_rate(step, total, low=1e-3, high=2e-2):
    """Decay in the first half, then a constant rate for the averaging."""
    half = total // 2
    return low + (high - low) * (1 - step / half) if step < half else 5e-3


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tab"))
    ap.add_argument("--resume", type=pathlib.Path)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = table(960, 1)
    test = table(501, 2)

    torch.manual_seed(9)
    model = TabularResNet(9, 3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    sam = SAM(model.parameters(), base, args.rho)
    swa = ShardedSWA(model)
    order = torch.Generator().manual_seed(5)
    queue = torch.empty(0, dtype=torch.long)
    start = 0
    if args.resume:
        newest = max(args.resume.glob("*.0.pt"), key=lambda p: int(p.name.split(".")[0]))
        start = int(newest.name.split(".")[0])
        d = torch.load(args.resume / f"{start}.{rank}.pt", weights_only=False)
        model.load_state_dict(d["model"])
        base.load_state_dict(d["base"])
        swa.mean, swa.count = d["swa"]
        queue = d["queue"]
        order.set_state(d["order"])

    for step in range(start, args.steps):
        if len(queue) < args.batch:
            queue = torch.randperm(len(x), generator=order)
        rows, queue = queue[: args.batch], queue[args.batch :]
        mine = rows.chunk(world)[rank]
        base.param_groups[0]["lr"] = learning_rate(step, args.steps)
        loss = sam.minimise(lambda: F.cross_entropy(model(x[mine]), y[mine]))
        if step >= args.steps // 2 and step % 2:
            swa.collect()
        if step % 6 == 5:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item() / world:.4f} averaged {swa.count}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            torch.save(
                {
                    "model": model.state_dict(),
                    "base": base.state_dict(),
                    "swa": (swa.mean, swa.count),
                    "queue": queue,
                    "order": order.get_state(),
                },
                args.out / f"{step + 1}.{rank}.pt",
            )

    last = evaluate(model, *test)
    with swa.applied():
        averaged = evaluate(model, *test)
    if rank == 0:
        print(f"last weights: test loss {last[0]:.5f} accuracy {last[1]:.4f}")
        print(f"averaged:     test loss {averaged[0]:.5f} accuracy {averaged[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
