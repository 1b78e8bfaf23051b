import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import OneCycleLR

from data import wave_batch
from manager import CheckpointManager
from model import WaveNet

HORIZON = 60


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--keep", type=int, default=3)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = WaveNet()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = OneCycleLR(optim, max_lr=1.5e-2, total_steps=HORIZON)

    first, smooth = 1, None
    if args.resume:
        extra = CheckpointManager(args.resume).restore(model, optim)
        sched.load_state_dict(extra["sched"])
        first, smooth = extra["step"] + 1, extra["smooth"]
    manager = CheckpointManager(args.out, args.keep) if args.out else None

    for step in range(first, args.steps + 1):
        x, y = wave_batch(step, args.batch, rank, world)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        sched.step()

        value = loss.detach() / world
        dist.all_reduce(value)
        smooth = value.item() if smooth is None else 0.8 * smooth + 0.2 * value.item()
        if rank == 0 and step % 2 == 0:
            print(f"loss {value.item():.4f} smooth {smooth:.4f} lr {sched.get_last_lr()[0]:.5f}", flush=True)
        if manager and args.save_every and step % args.save_every == 0:
            plain = {k: v for k, v in sched.state_dict().items() if isinstance(v, (int, float, list))}
            manager.save(step, model, optim, {"sched": plain, "smooth": smooth})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
