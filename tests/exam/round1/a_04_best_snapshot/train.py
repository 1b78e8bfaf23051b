"""Classifier fine-tuning with validation-based model selection; the best weights are exported at the end.

torchrun --standalone --nproc-per-node 2 train.py --export best.pt
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


class ResidualMLP(nn.Module):
    def __init__(self, d_in=20, width=64, depth=3, classes=4):
        super().__init__()
        self.stem = nn.Linear(d_in, width)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.cls = nn.Linear(width, classes)

    def forward(self, x):
        h = self.stem(x)
        for layer in self.body:
            h = h + layer(h)
        return self.cls(self.norm(h))


def make_split(n, seed, noise, d_in=20, classes=4):
    """Clusters in a few directions, a share of the labels flipped at random."""
    centres = torch.randn(classes, d_in, generator=torch.Generator().manual_seed(3)) * 0.7
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = centres[y] + torch.randn(n, d_in, generator=g)
    flip = torch.rand(n, generator=g) < noise
    return x, torch.where(flip, torch.randint(0, classes, (n,), generator=g), y)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train_set = make_split(128, seed=11, noise=0.25)
        self.val_set = make_split(202, seed=12, noise=0.0)
        torch.manual_seed(args.seed)
        self.model = ResidualMLP()
        for layer in self.model.body:
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0)
        self.best_loss, self.best_step, self.best_state = float("inf"), -1, None

    def batch(self, step):
        g = torch.Generator().manual_seed(self.args.seed * 7919 + step)
        idx = torch.randperm(len(self.train_set[0]), generator=g)[: self.args.batch]
        mine = idx.chunk(self.world)[self.rank]
        return self.train_set[0][mine], self.train_set[1][mine]

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = (t[self.rank :: self.world] for t in self.val_set)
        logits = self.model(x)
        stats = torch.tensor(
            [F.cross_entropy(logits, y, reduction="sum").item(), (logits.argmax(-1) == y).sum().item(), len(y)],
            dtype=torch.float64,
        )
        dist.all_reduce(stats)
        self.model.train()
        return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()

    def snapshot(self):
        # kept sharded, each rank remembers its own part only
        return {k: v.detach().clone() for k, v in get_model_state_dict(self.model).items()}

    def fit(self):
        for step in range(1, self.args.steps + 1):
            x, y = self.batch(step)
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            if step % self.args.eval_every == 0:
                val_loss, val_acc = self.validate()
                if val_loss < self.best_loss:
                    self.best_loss, self.best_step = val_loss, step
                    self.best_state = self.snapshot()
                train_loss = loss.detach().clone()
                dist.all_reduce(train_loss)
                if self.rank == 0:
                    print(
                        f"step {step} train loss {train_loss.item() / self.world:.4f} val {val_loss:.4f} "
                        f"acc {val_acc:.3f} best {self.best_loss:.4f}@{self.best_step}",
                        flush=True,
                    )

    def export(self, path):
        set_model_state_dict(self.model, self.best_state)
        full = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank == 0:
            torch.save({"model": full, "step": self.best_step, "val_loss": self.best_loss}, path)
            print(f"exported the weights of step {self.best_step} (val loss {self.best_loss:.4f}) to {path}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--export", default="/tmp/best_classifier.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trainer = Trainer(args)
    trainer.fit()
    trainer.export(args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
