import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from averaging import ShardedEMA
from towers import TwoTower

N_USERS, N_ITEMS, N_FEATS, BATCH = 200, 120, 8, 256


class Clicks:
    def __init__(self):
        g = torch.Generator().manual_seed(5)
        self.ufeat = torch.randn(N_USERS, N_FEATS, generator=g)
        self.ifeat = torch.randn(N_ITEMS, N_FEATS, generator=g)
        self.w = torch.randn(N_FEATS, N_FEATS, generator=g) / N_FEATS ** 0.5

    def draw(self, seed, n):
        g = torch.Generator().manual_seed(seed)
        u = torch.randint(0, N_USERS, (n,), generator=g)
        i = torch.randint(0, N_ITEMS, (n,), generator=g)
        score = ((self.ufeat[u] @ self.w) * self.ifeat[i]).sum(-1)
        y = (torch.rand(n, generator=g) < torch.sigmoid(score)).float()
        return u, self.ufeat[u], i, self.ifeat[i], y


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.data = Clicks()
        torch.manual_seed(1)
        self.model = TwoTower(N_USERS, N_ITEMS, N_FEATS)
        mesh = init_device_mesh("cpu", (self.world,))
        fully_shard(self.model.user, mesh=mesh)
        fully_shard(self.model.item, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.ema = ShardedEMA(self.model, args.ema_decay)
        self.step = 0

    def state(self):
        msd, osd = get_state_dict(self.model, self.opt)
        return {"model": msd, "optim": osd, "ema": self.ema.state_dict(), "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"{self.step:06d}"))

    def load(self, root):
        last = sorted(os.listdir(root))[-1]
        st = self.state()
        dcp.load(st, checkpoint_id=os.path.join(root, last))
        set_state_dict(self.model, self.opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
        self.step = st["step"]

    def train_step(self):
        batch = self.data.draw(10_000 + self.step, BATCH)
        *x, y = [t.chunk(self.world)[self.rank] for t in batch]
        loss = F.binary_cross_entropy_with_logits(self.model(*x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.ema.update(self.model)
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(self):
        *x, y = [t.chunk(self.world)[self.rank] for t in self.data.draw(77, 2048)]
        loss = F.binary_cross_entropy_with_logits(self.model(*x), y)
        self.model.reshard()        # no backward follows that would do it
        dist.all_reduce(loss)
        return loss.item() / self.world

    def fit(self):
        while self.step < self.args.steps:
            loss = self.train_step()
            dist.all_reduce(loss)
            if self.rank == 0 and self.step % 30 == 0:
                print(f"step {self.step} loss {loss.item() / self.world:.4f}")
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
        raw = self.evaluate()
        self.ema.swap(self.model)
        served = self.evaluate()
        if self.rank == 0:
            print(f"test logloss: last weights {raw:.4f}, served (averaged) {served:.4f}")
        full = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank == 0 and self.args.serve_to:
            torch.save(full, self.args.serve_to)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--ema-decay", type=float, default=0.98)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume")
    p.add_argument("--serve-to")
    args = p.parse_args()
    dist.init_process_group("gloo")
    t = Trainer(args)
    if args.resume:
        t.load(args.resume)
    t.fit()
    dist.destroy_process_group()
