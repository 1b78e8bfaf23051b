import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from clicks import ClickLog, epochs
from towers import TwoTower
from weights import materialize


def held_out(model, log, rank, world):
    rows = torch.arange(log.n_train, len(log.y))[rank::world]
    with torch.no_grad():
        x, y = log[rows]
        score = model(*x)
        s = torch.stack([F.binary_cross_entropy_with_logits(score, y, reduction="sum"), ((score > 0) == y.bool()).sum(), torch.tensor(len(y))]).double()
    dist.all_reduce(s)
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = ClickLog()
    with torch.device("meta"):
        model = TwoTower(48, 32)
    for tower in (model.user, model.item):
        fully_shard(tower)
    fully_shard(model)
    materialize(model, cfg.seed)
    optim = torch.optim.Adam(model.parameters(), lr=cfg.lr)

    position = 0
    if cfg.resume:
        newest = sorted(Path(cfg.resume).glob("pos-*"))[-1]
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "position": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        position = state["position"]

    for position, rows in epochs(log.n_train, cfg.batch, rank, world, cfg.seed, position):
        if position > cfg.steps:
            break
        x, y = log[rows]
        loss = F.binary_cross_entropy_with_logits(model(*x), y)
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=True)
        if position % 14 == 0:
            bce, acc = held_out(model, log, rank, world)
            if rank == 0:
                print(f"{position:4d} loss {loss.item():.4f} held-out bce {bce:.4f} acc {acc:.3f}", flush=True)
        if cfg.save_every and position % cfg.save_every == 0:
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd, "position": position}, checkpoint_id=Path(cfg.out) / f"pos-{position:05d}")

    if cfg.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, cfg.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=84)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    main(ap.parse_args())
