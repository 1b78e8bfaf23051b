import argparse
import pathlib

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from model import ConvLM
from packing import PackedStream

VOCAB = 50


class Checkpointer:
    """One file per rank: local shards of the weights and of the optimizer, schedule and data."""

    def __init__(self, root, rank, world):
        self.root, self.rank, self.world = pathlib.Path(root), rank, world

    def save(self, step, model, optimizer, scheduler, stream):
        folder = self.root / f"step{step:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        payload = {
            "step": step,
            "world": self.world,
            "weights": {n: p.to_local().detach().clone() for n, p in model.named_parameters()},
            "moments": [{k: v.to_local().clone() if k != "step" else v.clone() for k, v in optimizer.state[p].items()}
                        for p in model.parameters()],
            "scheduler": scheduler.state_dict(),
            "stream": stream.state_dict(),
        }
        torch.save(payload, folder / f"rank{self.rank}.pt")
        dist.barrier()
        if self.rank == 0:
            (folder / "COMPLETE").touch()
        dist.barrier()

    def load(self, model, optimizer, scheduler, stream):
        folder = max(f.parent for f in self.root.glob("step*/COMPLETE"))
        payload = torch.load(folder / f"rank{self.rank}.pt")
        if payload["world"] != self.world:
            raise RuntimeError(f"saved on {payload['world']} ranks, running on {self.world}")
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.to_local().copy_(payload["weights"][n])
            for p, saved in zip(model.parameters(), payload["moments"]):
                state = {"step": saved["step"]}
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(p)
                    state[key].to_local().copy_(saved[key])
                optimizer.state[p] = state
        scheduler.load_state_dict(payload["scheduler"])
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr()):
            group["lr"] = lr
        stream.load_state_dict(payload["stream"])
        return payload["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--row-len", type=int, default=32)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--checkpoints", default="checkpoints")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = ConvLM(VOCAB)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, cycle_momentum=False)
    stream = PackedStream(VOCAB, args.row_len, args.batch, rank, world)
    checkpointer = Checkpointer(args.checkpoints, rank, world)
    step = checkpointer.load(model, optimizer, scheduler, stream) if args.resume else 0

    while step < args.steps:
        loss = model(*next(stream))
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        norm = grad_norm.full_tensor()
        if rank == 0:
            print(f"{step:3d}  loss {mean.item():.5f}  norm {norm.item():.4f}  documents read {stream.next_doc}")
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            checkpointer.save(step, model, optimizer, scheduler, stream)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
