"""Click model on a stream of text records that a thread parses ahead of the training."""
import argparse
import queue
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

FIELDS, BUCKETS, END = 6, 50, None


class Clicks(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.fields = nn.ModuleList(nn.Embedding(BUCKETS, width) for _ in range(FIELDS))
        self.deep = nn.Sequential(nn.Linear(FIELDS * width, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        return self.out(self.deep(torch.cat([f(x[:, i]) for i, f in enumerate(self.fields)], dim=1)))


def records(step, batch):
    """Lines as the log has them; later ones have records whose label is not known."""
    g = torch.Generator().manual_seed(step * 13 + 1)
    x = torch.randint(BUCKETS, (batch, FIELDS), generator=g)
    label = (x[:, 0] % 5 + x[:, 1] % 4 + x[:, 2] % 3) // 3 % 3
    lines = [",".join(map(str, [*row, y])) for row, y in zip(x.tolist(), label.tolist())]
    if step >= 36:
        lines = [line[:-1] + "?" if i % 11 == 5 else line for i, line in enumerate(lines)]
    return lines


def parse(lines):
    rows = [line.split(",") for line in lines]
    x = torch.tensor([[int(v) for v in row[:-1]] for row in rows])
    # ignored by the loss
    y = torch.tensor([-100 if row[-1] == "?" else int(row[-1]) for row in rows])
    return x, y


def produce(out, args, rank, world):
    try:
        for step in range(args.steps):
            x, y = parse(records(step, args.batch))
            known = (y >= 0).sum()
            out.put((x[rank::world], y[rank::world], known))
    finally:
        out.put(END)


class Plateau:
    """Halves the learning rate when the mean loss has not improved for `patience` steps."""

    def __init__(self, optimizer, patience):
        self.optimizer, self.patience = optimizer, patience
        self.smooth, self.best, self.since, self.drops = None, float("inf"), 0, 0

    def see(self, loss):
        self.smooth = loss if self.smooth is None else 0.8 * self.smooth + 0.2 * loss
        self.since = 0 if self.smooth < self.best - 0.01 else self.since + 1
        self.best = min(self.best, self.smooth)
        if self.since >= self.patience:
            self.since, self.drops = 0, self.drops + 1
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5


def focus(step, args):
    """Weight of the entropy term: falls to nothing towards `calm`."""
    return 0.05 / (1 + step) if step < args.calm else 0.0


def one_step(model, optimizer, plateau, item, step, args):
    x, y, known = item
    world = dist.get_world_size()
    logits = model(x)
    total = F.cross_entropy(logits, y, reduction="sum", ignore_index=-100)
    spread = (logits.softmax(1) * logits.log_softmax(1)).sum() / args.batch
    loss = world * (total / known + focus(step, args) * spread)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    plateau.see(mean.item() / world)
    return plateau.smooth


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Clicks()
    fully_shard(model.deep)
    fully_shard(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr, eps=1e-5)
    plateau = Plateau(optimizer, args.patience)
    ahead = queue.Queue(maxsize=4)
    step = 0
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(produce, ahead, args, rank, world)
        while (item := ahead.get()) is not END:
            smooth = one_step(model, optimizer, plateau, item, step, args)
            step += 1
            if step % 10 == 0 and rank == 0:
                print(f"step {step} smooth loss {smooth:.5f} drops {plateau.drops}", flush=True)
        reader.result()
    if rank == 0:
        print(f"done after {step} steps", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=90)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--patience", type=int, default=7)
    ap.add_argument("--calm", type=int, default=50)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
