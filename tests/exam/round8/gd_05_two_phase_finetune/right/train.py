"""Fine-tuning in two phases: first only the head, then everything, with a cosine for each phase."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

from nets import Classifier, Trunk

HEAD_STEPS = 6
ALL_STEPS = 26
BATCH = 24


def make_textures(n=400, size=12, seed=1):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 6
    grid = torch.arange(size, dtype=torch.float32)
    freq = 0.4 + 0.35 * (y % 3)
    horizontal = torch.sin(freq[:, None, None] * grid[None, None, :] + 6.28 * torch.rand(n, 1, 1, generator=g))
    vertical = torch.sin(freq[:, None, None] * grid[None, :, None] + 6.28 * torch.rand(n, 1, 1, generator=g))
    x = torch.where((y < 3)[:, None, None], horizontal.expand(n, size, size), vertical.expand(n, size, size))
    return (x + 0.2 * torch.randn(n, size, size, generator=g))[:, None], y


class FineTuner:
    def __init__(self):
        torch.manual_seed(2)
        trunk = Trunk()
        self.model = Classifier(trunk)
        fully_shard(self.model.trunk)
        fully_shard(self.model)
        self.x, self.y = make_textures()
        self.step = 0
        self.start_head_phase()

    def start_head_phase(self):
        self.optimizer = torch.optim.AdamW(self.model.head.parameters(), lr=2e-2, eps=1e-6)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=HEAD_STEPS, eta_min=2e-3)

    def start_full_phase(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-6)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=ALL_STEPS)

    def train_step(self):
        if self.step == HEAD_STEPS:
            self.start_full_phase()
        g = torch.Generator().manual_seed(77 + self.step)
        idx = torch.randint(len(self.x), (BATCH,), generator=g)
        idx = idx.tensor_split(dist.get_world_size())[dist.get_rank()]
        loss = F.cross_entropy(self.model(self.x[idx]), self.y[idx])
        loss.backward()
        self.optimizer.step()
        self.model.zero_grad()
        self.scheduler.step()
        self.step += 1
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()

    def save(self, root):
        folder = os.path.join(root, f"step{self.step}")
        dcp.save({"model": get_model_state_dict(self.model)}, checkpoint_id=folder)
        torch.save({"step": self.step,
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict()},
                   os.path.join(folder, f"trainer_{dist.get_rank()}.pt"))
        dist.barrier()

    def load(self, root):
        folder = max(Path(root).glob("step*"), key=lambda p: int(p.name[4:]))
        state = {"model": get_model_state_dict(self.model)}
        dcp.load(state, checkpoint_id=str(folder))
        set_model_state_dict(self.model, state["model"])
        extra = torch.load(folder / f"trainer_{dist.get_rank()}.pt", weights_only=False)
        self.step = extra["step"]
        if self.step > HEAD_STEPS:
            self.start_full_phase()
        self.optimizer.load_state_dict(extra["optimizer"])
        self.scheduler.load_state_dict(extra["scheduler"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    tuner = FineTuner()
    if args.resume:
        tuner.load(args.resume)
    while tuner.step < HEAD_STEPS + ALL_STEPS:
        loss = tuner.train_step()
        if dist.get_rank() == 0 and tuner.step % 4 == 0:
            print(f"step {tuner.step} loss {loss:.4f}", flush=True)
        if args.save_every and tuner.step % args.save_every == 0:
            tuner.save(args.out)
    if args.export:
        full = get_model_state_dict(
            tuner.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
