"""Forward-only (MeZO-like) training of a text classifier; a checkpoint is the log of seeds and coefficients."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from zeroth import ForwardOnlyTrainer

VOCAB, LENGTH, CLASSES = 40, 12, 4


class BagClassifier(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.gate = nn.Linear(dim, 1)
        self.hidden = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(2 * dim, CLASSES)

    def forward(self, ids):
        e = self.embed(ids)
        weight = torch.softmax(self.gate(e), dim=1)
        return self.out(torch.tanh(self.hidden((weight * e).sum(1))))


def documents(n, seed):
    topics = torch.softmax(2 * torch.randn(CLASSES, VOCAB, generator=torch.Generator().manual_seed(80)), -1)
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (n,), generator=g)
    return torch.multinomial(topics[label], LENGTH, replacement=True, generator=g), label


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--log-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(18)
    model = BagClassifier()
    fully_shard(model, reshard_after_forward=True)
    trainer = ForwardOnlyTrainer(model, lr=args.lr, seed=500_000)
    if args.resume:
        trainer.replay_newest(args.resume)

    ids, labels = documents(1024, 81)
    n = args.batch // world
    while len(trainer.log) < args.steps:
        g = torch.Generator().manual_seed(82_000 + len(trainer.log))
        mine = torch.randint(1024, (args.batch,), generator=g)[rank * n:(rank + 1) * n]
        loss = trainer.step(lambda: F.cross_entropy(model(ids[mine]), labels[mine]))
        if rank == 0 and len(trainer.log) % 8 == 0:
            print(f"step {len(trainer.log)} loss {loss:.5f}", flush=True)
        if args.save_every and len(trainer.log) % args.save_every == 0:
            trainer.save(args.log_dir)

    test_ids, test_labels = documents(256, 83)
    with torch.no_grad():
        logits = model(test_ids)
        loss, hits = F.cross_entropy(logits, test_labels), (logits.argmax(1) == test_labels).float().mean()
    if rank == 0:
        print(f"test loss {loss:.5f} accuracy {hits:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
