import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import net
import optim
from store import Store

HORIZON = 60


def scale_at(step):
    """Trapezoid: warm-up, plateau, linear cool-down."""
    return min(1.0, (step + 1) / 4, max(0.05, (HORIZON - step) / 20))


def sample(step, n, rank, world):
    g = torch.Generator().manual_seed(step * 3 + 11)
    pair = torch.randint(40, (n, 2), generator=g)
    return pair[rank::world], ((pair[:, 0] // 4) + (pair[:, 1] // 8) * 3)[rank::world] % 10


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = net.sharded()
    opt = optim.make(model)
    store = Store(model, opt.optimizers)
    start = store.load(args.resume) if args.resume else 0

    for step in range(start, args.steps):
        pair, label = sample(step, args.batch, rank, world)
        loss = F.cross_entropy(model(pair), label)
        loss.backward()
        opt.set_scale(scale_at(step))
        opt.step()
        model.zero_grad()
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            store.save(args.out, step + 1)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:3d} loss {mean.item():.4f}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
