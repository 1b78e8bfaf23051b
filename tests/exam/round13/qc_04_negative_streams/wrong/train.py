import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import Ranker
from streams import STREAMS, StreamSet

USERS, ITEMS = 64, 40


def interactions(n=640, seed=4):
    g = torch.Generator().manual_seed(seed)
    users = torch.randint(USERS, (n,), generator=g)
    items = (users * 3 + torch.randint(6, (n,), generator=g)) % ITEMS
    return users, items


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = Ranker(USERS, ITEMS)
        for tower in (self.model.user, self.model.item):
            fully_shard(tower)
        fully_shard(self.model)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.02, eps=1e-5)
        self.data = StreamSet(*interactions(), ITEMS, self.rank, self.world)
        self.step = 0

    def state(self):
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "data": self.data.state_dict(), "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=Path(self.args.out) / f"step{self.step:04d}")

    def load(self, folder):
        latest = max(Path(folder).glob("step*"))
        state = self.state()
        dcp.load(state, checkpoint_id=latest)
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.data.load_state_dict(state["data"])
        self.step = state["step"]

    def fit(self):
        while self.step < self.args.steps:
            user, positive, negative = self.data.take(self.args.per_stream, self.args.negatives)
            loss = F.softplus(-self.model(user, positive, negative)).mean()
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.step += 1
            if self.step % 6 == 0:
                dist.all_reduce(shown := loss.detach().clone())
                if self.rank == 0:
                    print(f"step {self.step:3d} loss {shown.item() / self.world:.6f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0 and self.step < self.args.steps:
                self.save()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--per-stream", type=int, default=16)
    ap.add_argument("--negatives", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/negatives")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    if STREAMS % dist.get_world_size():
        raise SystemExit(f"the number of ranks must divide {STREAMS}")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit()
    dist.destroy_process_group()
