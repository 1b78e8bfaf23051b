import argparse
import math
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hooked import HookedAdam
from model import ConvLM
from stream import PackedStream

IGNORE = -100


def warmup_cosine(step, total, warmup):
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class Keeper:
    """Keeps the newest checkpoints in <root>/<step>/<rank>.pt and removes older ones."""

    def __init__(self, root, keep=2):
        self.root, self.keep = root, keep

    def save(self, step, state):
        folder = os.path.join(self.root, f"{step:06d}")
        os.makedirs(folder + ".tmp", exist_ok=True)
        torch.save(state, os.path.join(folder + ".tmp", f"{dist.get_rank()}.pt"))
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(folder + ".tmp", folder)
            for old in self.finished()[: -self.keep]:
                shutil.rmtree(os.path.join(self.root, old))
        dist.barrier()

    def finished(self):
        return sorted(n for n in os.listdir(self.root) if n.isdigit())

    def newest(self):
        return torch.load(os.path.join(self.root, self.finished()[-1], f"{dist.get_rank()}.pt"), weights_only=False)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=8)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    model = ConvLM()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = HookedAdam(model.named_parameters(), lr=args.lr)
    stream = PackedStream(rows=8, length=32, rank=rank, world=world, seed=78)

    step = 0
    if args.resume:
        state = Keeper(args.resume).newest()
        with torch.no_grad():
            for n, p in adam.params.items():
                p.copy_(state["params"][n])
        adam.state = state["adam"]
        stream.load_state_dict(state["stream"])
        step = state["step"]

    for x, y, mask, tokens in stream:
        if step == args.steps:
            break
        adam.scale = warmup_cosine(step, args.steps, warmup=5)
        logits = model(x).flatten(0, 1)
        target = y.masked_fill(~mask, IGNORE).flatten()
        # sum over this rank's tokens / tokens of the global batch; the gradient mean over ranks is undone by * world
        loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum") / tokens
        (loss * world).backward()
        step += 1

        if step % 8 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item():.4f} tokens {int(tokens)}", flush=True)
        if args.out and step % args.save_every == 0:
            params = {n: p.detach() for n, p in adam.params.items()}
            Keeper(args.out).save(step, {"params": params, "adam": adam.state, "stream": stream.state_dict(), "step": step})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
