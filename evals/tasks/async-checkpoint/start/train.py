"""FSDP2 training with distributed checkpoints: torchrun --nproc-per-node 2 train.py --out out [--resume out]"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Config
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Progress(Stateful):
    """All that a run is: model, optimizer, step."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


class Checkpoints:
    """Folders step_N below `out`; out/latest.txt names the newest one that is complete."""

    def __init__(self, out):
        self.out = out

    def save(self, progress):
        folder = self.out / f"step_{progress.step}"
        dcp.save({"progress": progress}, checkpoint_id=folder)
        self.mark(folder)

    def mark(self, folder):
        if dist.get_rank() == 0:
            (self.out / "latest.txt").write_text(folder.name)

    def finish(self):
        dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, help="the --out of an earlier run")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = GPT(Config(vocab=VOCAB, length=LENGTH))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    progress = Progress(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if args.resume:
        newest = args.resume / (args.resume / "latest.txt").read_text()
        dcp.load({"progress": progress}, checkpoint_id=newest)

    checkpoints = Checkpoints(args.out) if args.out else None
    inputs, targets = sequences(256)
    while progress.step < args.steps:
        mine = batch_of(progress.step, args.batch, len(inputs)).chunk(world)[rank]
        loss = F.cross_entropy(model(inputs[mine]).flatten(0, 1), targets[mine].flatten())
        loss.backward()
        progress.optimizer.step()
        progress.optimizer.zero_grad()
        progress.step += 1
        if checkpoints and progress.step % args.save_every == 0:
            checkpoints.save(progress)
    if checkpoints:
        checkpoints.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
