import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from callbacks import _local


@dataclass
class TrainerArgs:
    steps: int = 48
    batch: int = 16
    eval_every: int = 3
    lr: float = 1e-2
    seed: int = 0
    save_every: int = 0
    out: str = ""


class Trainer:
    def __init__(self, model, args, train_set, val_set, callbacks):
        self.model, self.args, self.callbacks = model, args, callbacks
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train_set, self.val_set = train_set, val_set
        self.optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)
        self.step, self.last_loss = 0, 0.0

    def batch(self):
        x, y = self.train_set
        per_epoch = len(x) // self.args.batch
        g = torch.Generator().manual_seed(self.args.seed + self.step // per_epoch)
        order = torch.randperm(len(x), generator=g)
        at = self.step % per_epoch * self.args.batch
        pick = order[at : at + self.args.batch].chunk(self.world)[self.rank]
        return x[pick], y[pick]

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x, y = (t.chunk(self.world)[self.rank] for t in self.val_set)
        total = torch.zeros(2)
        for xb, yb in zip(x.split(16), y.split(16)):
            total += torch.tensor([F.cross_entropy(self.model(xb), yb, reduction="sum").item(), len(yb)])
        dist.all_reduce(total)
        self.model.train()
        return (total[0] / total[1]).item()

    def train(self):
        while self.step < self.args.steps:
            x, y = self.batch()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.last_loss = loss.item()
            if self.step % self.args.eval_every == 0:
                val_loss = self.evaluate()
                for cb in self.callbacks:
                    cb.on_eval(self, val_loss)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
        for cb in self.callbacks:
            cb.on_train_end(self)

    def save(self):
        folder = pathlib.Path(self.args.out) / f"checkpoint-{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        names = {p: n for n, p in self.model.named_parameters()}
        torch.save(
            {
                "step": self.step,
                "model": {n: _local(p).detach() for n, p in self.model.named_parameters()},
                "optimizer": {
                    names[p]: {k: _local(v) for k, v in s.items()} for p, s in self.optimizer.state.items()
                },
                "callbacks": [cb.state_dict() for cb in self.callbacks],
            },
            folder / f"shard_{self.rank}_of_{self.world}.pt",
        )
        dist.barrier()

    @torch.no_grad()
    def resume(self, root):
        folder = max(pathlib.Path(root).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
        state = torch.load(folder / f"shard_{self.rank}_of_{self.world}.pt")
        # one step with zero gradients and rate 0 lets the optimizer allocate its (sharded) state
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr
        for n, p in self.model.named_parameters():
            _local(p).copy_(state["model"][n])
            for k, v in self.optimizer.state[p].items():
                _local(v).copy_(state["optimizer"][n][k])
        for cb, s in zip(self.callbacks, state["callbacks"]):
            cb.load_state_dict(s)
        self.step = state["step"]
