"""Segmentation with early stopping; the result is the model of the best validation mIoU."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from metrics import mean_iou
from seg import SmallFCN, make_scenes

N_CLASSES = 4


@dataclass
class Best:
    miou: float = -1.0
    step: int = 0
    weights: dict | None = None


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = SmallFCN(N_CLASSES)
        fully_shard(self.model.down)
        fully_shard(self.model.mid)
        fully_shard(self.model)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.train_x, self.train_y = make_scenes(64, 1, noise=0.5)
        self.val_x, self.val_y = make_scenes(64, 2, noise=0.5)
        self.order = torch.Generator().manual_seed(args.seed)
        self.step, self.bad, self.best = 0, 0, Best()

    def train_step(self):
        idx = torch.randint(0, len(self.train_x), (self.args.batch,), generator=self.order)[self.rank :: self.world]
        loss = F.cross_entropy(self.model(self.train_x[idx]), self.train_y[idx])
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.step += 1
        return loss.detach()

    def validate(self):
        miou = mean_iou(self.model, self.val_x, self.val_y, N_CLASSES, self.rank, self.world)
        if miou > self.best.miou:
            weights = {k: v.detach() for k, v in self.model.state_dict().items()}
            self.best = Best(miou, self.step, weights)
            self.bad = 0
        else:
            self.bad += 1
        return miou

    def fit(self):
        a = self.args
        while self.step < a.max_steps and self.bad < a.patience:
            loss = self.train_step()
            if self.step % a.val_every == 0:
                miou = self.validate()
                dist.all_reduce(loss)
                if self.rank == 0:
                    print(f"step {self.step} loss {loss.item() / self.world:.4f} val mIoU {miou:.4f}")
            if a.save_every and self.step % a.save_every == 0:
                self.save()
        self.model.load_state_dict(self.best.weights)
        final = mean_iou(self.model, self.val_x, self.val_y, N_CLASSES, self.rank, self.world)
        if self.rank == 0:
            print(f"best mIoU {self.best.miou:.4f} at step {self.best.step}; restored model {final:.4f}")

    # one file per rank, to be read again with the same number of ranks
    def save(self):
        folder = os.path.join(self.args.out, f"step{self.step:05d}")
        os.makedirs(folder, exist_ok=True)
        local = lambda sd: {k: v.to_local().clone() for k, v in sd.items()}
        torch.save(
            {
                "model": local(self.model.state_dict()),
                "momentum": [self.opt.state[p]["momentum_buffer"].to_local() for p in self.model.parameters()],
                "order": self.order.get_state(),
                "step": self.step,
                "bad": self.bad,
                "best": (self.best.miou, self.best.step, local(self.best.weights) if self.best.weights else None),
            },
            os.path.join(folder, f"rank{self.rank}.pt"),
        )
        dist.barrier()

    def load(self, root):
        folder = os.path.join(root, sorted(os.listdir(root))[-1])
        s = torch.load(os.path.join(folder, f"rank{self.rank}.pt"))
        with torch.no_grad():
            for k, v in self.model.state_dict().items():
                v.to_local().copy_(s["model"][k])
            for p, m in zip(self.model.parameters(), s["momentum"]):
                buf = torch.zeros_like(p)
                buf.to_local().copy_(m)
                self.opt.state[p]["momentum_buffer"] = buf
            miou, step, weights = s["best"]
            if weights is not None:
                full = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
                for k, v in full.items():
                    v.to_local().copy_(weights[k])
                weights = full
        self.best = Best(miou, step, weights)
        self.order.set_state(s["order"])
        self.step, self.bad = s["step"], s["bad"]


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=90)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--val-every", type=int, default=3)
    ap.add_argument("--patience", type=int, default=6)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/seg")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.load(args.resume)
    run.fit()
    if args.export:
        sd = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
        if run.rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()
