import argparse
import os
import re

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from encoder import Encoder, info_nce
from views import make_items, two_views

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def mine(t):
    return t.chunk(dist.get_world_size())[dist.get_rank()]


@torch.no_grad()
def validation_loss(model, items, batch):
    """Mean InfoNCE over this rank's part of the fixed validation views."""
    gen = torch.Generator().manual_seed(77)
    losses = []
    for chunk in items.split(batch):
        a, b = two_views(chunk, gen)
        losses.append(info_nce(model(mine(a)), model(mine(b))))
    model.reshard()
    return torch.stack(losses).mean()


def save(folder, step, model, opt, sched, gen):
    state = {
        "model": get_model_state_dict(model, options=FULL),
        "optim": get_optimizer_state_dict(model, opt, options=FULL),
        "sched": sched.state_dict(),
        "gen": gen.get_state(),
        "step": step,
    }
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, os.path.join(folder, f"step_{step}.pt"))
    dist.barrier()


def load(folder, model, opt, sched, gen):
    step = max(int(re.findall(r"\d+", f)[0]) for f in os.listdir(folder))
    state = torch.load(os.path.join(folder, f"step_{step}.pt"), weights_only=False)
    first = dist.get_rank() == 0
    set_model_state_dict(model, state["model"] if first else {}, options=BROADCAST)
    set_optimizer_state_dict(model, opt, state["optim"] if first else {}, options=BROADCAST)
    sched.load_state_dict(state["sched"])
    gen.set_state(state["gen"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Encoder()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.trunk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.01)

    train, val = make_items(512, seed=1), make_items(64, seed=2)
    gen = torch.Generator().manual_seed(5)
    start = load(args.resume, model, opt, sched, gen) if args.resume else 0

    for step in range(start + 1, args.steps + 1):
        items = train[torch.randint(len(train), (args.batch,), generator=gen)]
        a, b = two_views(items, gen)
        loss = info_nce(model(mine(a)), model(mine(b)))
        opt.zero_grad()
        loss.backward()
        opt.step()

        if step % args.eval_every == 0:
            val_loss = validation_loss(model, val, args.batch)
            dist.all_reduce(val_loss)
            val_loss /= world
            sched.step(val_loss.item())
            if rank == 0:
                print(f"step {step} val {val_loss.item():.4f} lr {opt.param_groups[0]['lr']:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt, sched, gen)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
