"""Language model on a packed stream with a fused, tied output layer."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from model import TiedLM
from stream import PackedStream

ROWS, LENGTH = 16, 20


class Training(Stateful):
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched = model, opt, sched
        self.step = 0

    def state_dict(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.step = state["step"]


def save(training, stream, out):
    folder = Path(out) / f"step_{training.step}"
    dcp.save({"training": training}, checkpoint_id=str(folder))
    if dist.get_rank() == 0:
        torch.save(stream.state_dict(), folder / "stream.pt")
        (Path(out) / "latest").write_text(folder.name)
    dist.barrier()


def load(training, stream, out):
    folder = Path(out) / (Path(out) / "latest").read_text()
    dcp.load({"training": training}, checkpoint_id=str(folder))
    stream.load_state_dict(torch.load(folder / "stream.pt"))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = TiedLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=args.steps)
    training, stream = Training(model, opt, sched), PackedStream(28, LENGTH, seed=5)
    if args.resume:
        load(training, stream, args.resume)

    for ids, document in stream.batches(ROWS, rank, world):
        if training.step == args.steps:
            break
        loss = model(ids, document)
        # a sum over the local tokens, which FSDP averages over the ranks; what counts is the mean over all tokens
        (loss * world / (ROWS * LENGTH)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        if training.step + 1 < args.steps:
            sched.step()
        training.step += 1
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0 and training.step % 3 == 0:
            print(f"step {training.step} loss {total.item() / (ROWS * LENGTH):.5f}", flush=True)
        if args.save_every and training.step % args.save_every == 0 and training.step < args.steps:
            save(training, stream, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
