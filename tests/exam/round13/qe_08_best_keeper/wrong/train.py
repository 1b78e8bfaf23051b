import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from export import export_npz
from keeper import BestKeeper, shard_of
from task import Regressor, toy


def to_file(folder, step, model, optimizer, keeper):
    folder = Path(folder) / f"it{step:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "step": step,
            "model": {n: shard_of(p.detach()) for n, p in model.named_parameters()},
            "optim": [{k: shard_of(v) for k, v in optimizer.state[p].items()} for p in model.parameters()],
            "keeper": keeper.state_dict(),
        },
        folder / f"rank{dist.get_rank()}of{dist.get_world_size()}.pt",
    )
    dist.barrier()


@torch.no_grad()
def from_file(folder, model, optimizer, keeper):
    newest = sorted(p for p in Path(folder).glob("it*") if p.is_dir())[-1]
    state = torch.load(newest / f"rank{dist.get_rank()}of{dist.get_world_size()}.pt")
    for n, p in model.named_parameters():
        shard_of(p).copy_(state["model"][n])
    for p, saved in zip(model.parameters(), state["optim"]):
        optimizer.state[p] = {
            k: v if k == "step" else torch.zeros_like(p, requires_grad=False) for k, v in saved.items()
        }
        for k in ("exp_avg", "exp_avg_sq"):
            shard_of(optimizer.state[p][k]).copy_(saved[k])
    keeper.load_state_dict(state["keeper"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(9)
    model = Regressor()
    offload = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, offload_policy=offload)
    fully_shard(model, reshard_after_forward=True, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, eps=1e-5, weight_decay=0.0)
    keeper = BestKeeper(model)
    x, y = (t.chunk(world)[rank] for t in toy(48, seed=1))
    vx, vy = (t.chunk(world)[rank] for t in toy(128, seed=2))

    step = from_file(args.resume, model, optimizer, keeper) if args.resume else 0
    while step < args.steps:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 4 == 0:
            with torch.no_grad():
                scores = torch.stack([loss.detach(), (model(vx) - vy).square().mean()]) / world
            dist.all_reduce(scores)
            better = keeper.offer(scores[1].item(), step)
            if rank == 0:
                print(f"{step:3d} train {scores[0]:.5f} valid {scores[1]:.5f}{' *' if better else ''}", flush=True)
        if args.save_every and step % args.save_every == 0:
            to_file(args.out, step, model, optimizer, keeper)

    keeper.put_back()
    if args.out:
        export_npz(model, Path(args.out) / "best.npz", step=keeper.step, valid=keeper.value)
    if rank == 0:
        print(f"kept step {keeper.step} valid {keeper.value:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
