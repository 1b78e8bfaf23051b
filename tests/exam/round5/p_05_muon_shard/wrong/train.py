import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from data import batch
from model import LM
from muon import Muon


def lr_scale(step, total, warm=4, cool=0.3):
    if step < warm:
        return (step + 1) / warm
    left = total - step
    return min(1.0, left / (cool * total))


class Run:
    def __init__(self, a):
        self.a, self.step = a, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(a.seed)
        self.model = LM()
        mesh = init_device_mesh("cpu", (self.world,))
        for l in self.model.layers:
            fully_shard(l, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        hidden = [p for n, p in self.model.named_parameters() if p.ndim == 2 and n.startswith("layers.")]
        rest = [p for n, p in self.model.named_parameters() if not (p.ndim == 2 and n.startswith("layers."))]
        self.opts = [Muon(hidden, lr=a.lr), torch.optim.AdamW(rest, lr=a.lr_adam, betas=(0.9, 0.95), weight_decay=0.0)]
        self.base = [a.lr, a.lr_adam]

    def save(self):
        m, o = get_state_dict(self.model, self.opts)
        dcp.save({"m": m, "o": o, "step": self.step}, checkpoint_id=os.path.join(self.a.out, f"s{self.step:05d}"))

    def load(self, folder):
        last = max(d for d in os.listdir(folder) if d.startswith("s") and os.path.exists(os.path.join(folder, d, ".metadata")))
        m, o = get_state_dict(self.model, self.opts)
        sd = {"m": m, "o": o, "step": 0}
        dcp.load(sd, checkpoint_id=os.path.join(folder, last))
        set_state_dict(self.model, self.opts, model_state_dict=sd["m"], optim_state_dict=sd["o"])
        self.step = sd["step"]

    def train_step(self):
        ids = batch(self.step, self.a.rows).chunk(self.world)[self.rank]
        logits = self.model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for opt, base in zip(self.opts, self.base):
            for g in opt.param_groups:
                g["lr"] = base * lr_scale(self.step, self.a.horizon)
            opt.step()
            opt.zero_grad()
        self.step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return shown.item() / self.world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--horizon", type=int, default=30, help="length of the schedule")
    ap.add_argument("--rows", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--lr-adam", type=float, default=0.01)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ck")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(a)
    if a.resume:
        run.load(a.resume)
    while run.step < a.steps:
        loss = run.train_step()
        if run.rank == 0:
            print(f"step {run.step} loss {loss:.4f}", flush=True)
        if a.save_every and run.step % a.save_every == 0:
            run.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
