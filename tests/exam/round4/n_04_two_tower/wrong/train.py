import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from interactions import Clicks
from retrieval import Popularity, gather_rows, sampled_softmax
from towers import TwoTower


def options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"))
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    return ap.parse_args()


class Trainer:
    def __init__(self, opts):
        self.opts, self.rank, self.world = opts, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.clicks = Clicks()
        self.model = TwoTower(self.clicks.users, self.clicks.items)
        mesh = init_device_mesh("cpu", (self.world,))
        fully_shard(self.model.user, mesh=mesh)
        fully_shard(self.model.item, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.pop = Popularity(self.clicks.items)
        self.opt = torch.optim.Adagrad(self.model.parameters(), lr=opts.lr)
        self.step = 0

    def state(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "freq": self.pop.freq, "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=self.opts.out / f"ck{self.step:04d}")

    def restore(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=max(folder.glob("ck*")))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.pop.freq.copy_(state["freq"])
        self.step = state["step"]

    def train_step(self):
        pairs = self.clicks.batch(self.step, self.opts.batch).chunk(self.world)[self.rank]
        u, v = self.model(pairs)
        items = gather_rows(pairs[:, 1])
        self.pop.update(pairs[:, 1])
        # every rank evaluates the loss of the whole batch; its gradient covers the rows of this rank only,
        # so the ranks' gradients are to be added up, whereas FSDP takes their mean
        loss = sampled_softmax(gather_rows(u), gather_rows(v), items, self.pop)
        (loss * self.world).backward()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()


def main():
    opts = options()
    dist.init_process_group("gloo")
    t = Trainer(opts)
    if opts.resume:
        t.restore(opts.resume)
    while t.step < opts.steps:
        loss = t.train_step()
        if t.rank == 0 and t.step % 5 == 0:
            print(f"{t.step:4d} loss {loss:.4f}", flush=True)
        if opts.save_every and t.step % opts.save_every == 0:
            t.save()
    if opts.export:
        full = {k: v.full_tensor() for k, v in t.model.state_dict().items()}
        if t.rank == 0:
            torch.save(full, opts.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
