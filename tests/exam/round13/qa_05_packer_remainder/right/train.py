import argparse
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gpt import GPT
from packing import Documents, Packer


@dataclass
class Config:
    vocab: int = 40
    length: int = 24
    rows: int = 8
    steps: int = 30
    peak: float = 8e-3
    warm: int = 5
    cool: int = 8


def wsd(cfg, step):
    """Warm up, stay, cool down."""
    return cfg.peak * min(1.0, (step + 1) / cfg.warm, (cfg.steps - step) / cfg.cool)


def save(folder, step, model, opt, packer):
    m, o = get_state_dict(model, opt)
    here = os.path.join(folder, f"at_{step}")
    dcp.save({"model": m, "optim": o}, checkpoint_id=here)
    if dist.get_rank() == 0:
        with open(os.path.join(here, "data.json"), "w") as f:
            json.dump(packer.state_dict(), f)
    dist.barrier()


def load(folder, model, opt, packer):
    step = max(int(n[3:]) for n in os.listdir(folder) if n.startswith("at_"))
    here = os.path.join(folder, f"at_{step}")
    m, o = get_state_dict(model, opt)
    dcp.load({"model": m, "optim": o}, checkpoint_id=here)
    set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)
    with open(os.path.join(here, "data.json")) as f:
        packer.load_state_dict(json.load(f))
    return step


def main(flags, cfg=Config()):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = GPT(cfg.vocab, cfg.length)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.peak, weight_decay=0.05)
    packer = Packer(Documents(cfg.vocab, seed=6), cfg.length)
    begin = load(flags.resume, model, opt, packer) if flags.resume else 0

    for step in range(begin, cfg.steps):
        for group in opt.param_groups:
            group["lr"] = wsd(cfg, step)
        # every rank packs the whole batch, so that the stream does not depend on the number of ranks
        rows = packer.batch(cfg.rows)[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 3 == 0:
            print(f"[{step + 1:3d}] loss {mean:.4f} documents {packer.next_doc}", flush=True)
        if flags.save_every and (step + 1) % flags.save_every == 0 and step + 1 < cfg.steps:
            save(flags.out, step + 1, model, opt, packer)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    main(ap.parse_args())
