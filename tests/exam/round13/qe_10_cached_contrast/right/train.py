import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from cached import CachedContrast
from pairs import pairs
from towers import BagTower


def shard(tower):
    for layer in tower.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(tower)
    return tower


def snapshot(towers, optimizers, step):
    state = {"step": step}
    for name, tower in towers.items():
        state[name], state[name + "_optim"] = get_state_dict(tower, optimizers[name])
    return state


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=16)
    cli.add_argument("--batch", type=int, default=64)
    cli.add_argument("--chunk", type=int, default=8)
    cli.add_argument("--out", type=pathlib.Path)
    cli.add_argument("--save-every", type=int, default=0)
    cli.add_argument("--resume", type=pathlib.Path)
    a = cli.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(23)
    towers = {"question": shard(BagTower(64)), "answer": shard(BagTower(64))}
    optimizers = {
        "question": torch.optim.AdamW(towers["question"].parameters(), lr=5e-3, eps=1e-5),
        "answer": torch.optim.AdamW(towers["answer"].parameters(), lr=3e-3, eps=1e-5),
    }
    first = 0
    if a.resume:
        state = snapshot(towers, optimizers, 0)
        dcp.load(state, checkpoint_id=str(sorted(a.resume.iterdir())[-1]))
        for name, tower in towers.items():
            set_state_dict(tower, optimizers[name], model_state_dict=state[name], optim_state_dict=state[name + "_optim"])
        first = state["step"]

    objective = CachedContrast(list(towers.values()), a.chunk)
    for step in range(first, a.steps):
        loss = objective.backward(*pairs(step, a.batch, dist.get_rank(), dist.get_world_size()))
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 4 == 0:
            print(f"[{step + 1:3d}] loss {loss.item():.5f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(snapshot(towers, optimizers, step + 1), checkpoint_id=str(a.out / f"s{step + 1:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
