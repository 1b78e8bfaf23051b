"""Deep Cox regression; the training is a generator of events to which the reports and checkpoints listen."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from belief import AdaBelief, ShardEMA
from cox import GlobalCox, all_rows, breslow


def registry(n=800, columns=9, seed=31):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, columns, generator=g)
    log_hazard = x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3] + 0.5 * torch.sin(2 * x[:, 4])
    life = -torch.log(torch.rand(n, generator=g)) * torch.exp(-log_hazard)
    censor = -torch.log(torch.rand(n, generator=g)) * 2.5
    return x, torch.minimum(life, censor), (life <= censor).float()


class RiskNet(nn.Module):
    def __init__(self, columns, width=28):
        super().__init__()
        self.a = nn.Linear(columns, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        h = nn.functional.silu(self.a(x))
        h = h + nn.functional.silu(self.b(h))
        return self.c(h)


@contextlib.contextmanager
def averaged(ema):
    ema.swap()
    try:
        yield
    finally:
        ema.swap()


class Study:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.x, self.t, self.e = registry()
        self.n_train = 640
        torch.manual_seed(14)
        self.model = RiskNet(self.x.shape[1])
        fully_shard(self.model.b)
        # evaluation swaps weights around forwards without backward
        fully_shard(self.model, reshard_after_forward=True)
        self.opt = AdaBelief(self.model.parameters(), lr=5e-3, decay=0.01)
        self.ema = ShardEMA(self.model, decay=0.8)
        self.step = 0

    def rows(self, lo, hi):
        n = (hi - lo) // self.world
        return torch.arange(lo + self.rank * n, lo + (self.rank + 1) * n)

    def training(self, steps, batch=128):
        while self.step < steps:
            epoch, at = divmod(self.step, self.n_train // batch)
            order = torch.randperm(self.n_train, generator=torch.Generator().manual_seed(600 + epoch))
            rows = order[at * batch:(at + 1) * batch].chunk(self.world)[self.rank]
            loss = GlobalCox.apply(self.model(self.x[rows]).squeeze(-1), self.t[rows], self.e[rows])
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.ema.update()
            self.step += 1
            yield self.step, loss.item()

    @torch.no_grad()
    def concordance(self):
        rows = self.rows(self.n_train, len(self.x))
        with averaged(self.ema):
            risk = all_rows(self.model(self.x[rows]).squeeze(-1))
        t, e = all_rows(self.t[rows]), all_rows(self.e[rows])
        pairs = (t[:, None] < t[None]) & (e[:, None] > 0)
        return ((risk[:, None] > risk[None]) & pairs).sum().item() / pairs.sum().item()

    @torch.no_grad()
    def baseline(self):
        rows = self.rows(0, self.n_train)
        with averaged(self.ema):
            risk = self.model(self.x[rows]).squeeze(-1)
        return breslow(risk, self.t[rows], self.e[rows], (0.25, 0.5, 1.0, 2.0))

    def save(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save({"step": self.step, "model": self.model.state_dict(), "opt": self.opt.state_dict(),
                    "ema": self.ema.shadow}, os.path.join(folder, f"study_{self.step:05d}.{self.rank}"))

    def load(self, folder):
        name = max(n for n in os.listdir(folder) if n.endswith(f".{self.rank}"))
        s = torch.load(os.path.join(folder, name), weights_only=False)
        self.model.load_state_dict(s["model"])
        self.opt.load_state_dict(s["opt"])
        self.ema.shadow, self.step = s["ema"], s["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    study = Study()
    if args.resume:
        study.load(args.resume)
    for step, loss in study.training(args.steps):
        if step % 5 == 0:
            c = study.concordance()
            if study.rank == 0:
                print(f"step {step} loss {loss:.6f} averaged C-index {c:.4f}")
        if args.save_every and step % args.save_every == 0:
            study.save(args.out)
    hazard = study.baseline()
    if study.rank == 0:
        print("baseline hazard", [round(v, 6) for v in hazard.tolist()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
