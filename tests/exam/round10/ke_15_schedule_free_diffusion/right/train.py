import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from diffusion import Denoiser, noised
from schedule_free import ScheduleFreeAdam


def mean(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def training(model, optim, rng, step, steps):
    """Generator: one item per optimizer step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    while step < steps:
        xt, t, e = noised(rng, 64, rank, world)
        loss = F.mse_loss(model(xt, t), e)
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        yield step, mean(loss)


@torch.no_grad()
def validate(model, optim):
    held_out = noised(torch.Generator().manual_seed(123), 256, dist.get_rank(), dist.get_world_size())
    with optim.averaged():
        loss = mean(F.mse_loss(model(*held_out[:2]), held_out[2]))
        # the gathered average must not serve the next training step
        model.reshard()
    return loss


def save(folder, step, model, optim, rng):
    m, o = get_state_dict(model, optim)
    dcp.save(
        {"model": m, "optim": o, "rng": rng.get_state(), "step": torch.tensor(step)},
        checkpoint_id=os.path.join(folder, f"{step:06d}"),
    )


def load(folder, model, optim, rng):
    m, o = get_state_dict(model, optim)
    state = {"model": m, "optim": o, "rng": rng.get_state(), "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    rng.set_state(state["rng"])
    return int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    model = Denoiser()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    optim = ScheduleFreeAdam(model.parameters())
    rng = torch.Generator().manual_seed(77)
    start = load(args.resume, model, optim, rng) if args.resume else 0

    for step, loss in training(model, optim, rng, start, args.steps):
        if step % 10 == 0:
            val = validate(model, optim)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.4f} validation of the average {val:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, optim, rng)

    if args.export:
        with optim.averaged():
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            full = {k: v.clone() for k, v in full.items()}
        if dist.get_rank() == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
