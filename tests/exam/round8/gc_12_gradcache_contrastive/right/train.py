import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from encoders import ImageEncoder, TextEncoder
from gradcache import cached_backward, gather_rows


class Pairs:
    """Pictures with up to three bright cells, and captions that name the cells."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self, n):
        cells = torch.randint(0, 30, (n, 3), generator=self.gen)
        grid = torch.zeros(n, 36).scatter_(1, cells, 1.0).view(n, 1, 6, 6)
        x = nn.functional.interpolate(grid, scale_factor=2) + 0.2 * torch.randn(n, 1, 12, 12, generator=self.gen)
        return x, cells


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--chunk", type=int, default=8)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    encoders = [ImageEncoder(), TextEncoder()]
    fully_shard(encoders[0].conv)
    for e in encoders:
        fully_shard(e)
    log_scale = nn.Parameter(torch.tensor(math.log(5.0)))
    optims = [torch.optim.AdamW(e.parameters(), lr=args.lr) for e in encoders]
    scale_optim = torch.optim.SGD([log_scale], lr=0.05, momentum=0.9)
    data = Pairs(22)
    step = 0

    def snapshot():
        towers = {}
        for name, e, o in zip(("image", "text"), encoders, optims):
            m, s = get_state_dict(e, o)
            towers[name] = {"model": m, "optim": s}
        return {"towers": towers, "scale": {"value": log_scale.detach(), "momentum": scale_optim.state[log_scale].get("momentum_buffer", torch.zeros(()))}, "data": data.gen.get_state(), "step": step}

    if args.resume:
        state = snapshot()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume), key=lambda n: int(n.lstrip("s")))))
        for name, e, o in zip(("image", "text"), encoders, optims):
            t = state["towers"][name]
            set_state_dict(e, o, model_state_dict=t["model"], optim_state_dict=t["optim"])
        with torch.no_grad():
            log_scale.copy_(state["scale"]["value"])
        scale_optim.state[log_scale]["momentum_buffer"] = state["scale"]["momentum"].clone()
        data.gen.set_state(state["data"])
        step = state["step"]

    while step < args.steps:
        images, captions = (t.chunk(world)[rank] for t in data.draw(args.batch))
        loss = cached_backward(encoders, (images, captions), log_scale, args.chunk)
        for o in (*optims, scale_optim):
            o.step()
            o.zero_grad()
        with torch.no_grad():
            log_scale.clamp_(max=math.log(50.0))
        step += 1
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {log_scale.exp().item():.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=os.path.join(args.out, f"s{step}"))

    with torch.no_grad():
        images, captions = (t.chunk(world)[rank] for t in Pairs(23).draw(128))
        a, b = gather_rows(encoders[0](images)), gather_rows(encoders[1](captions))
        recall = ((a @ b.T).argmax(1) == torch.arange(128)).float().mean().item()
    if rank == 0:
        print(f"recall@1 among 128: {recall:.3f}", flush=True)
    if args.export:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {n: get_model_state_dict(e, options=options) for n, e in zip(("image", "text"), encoders)}
        full["log_scale"] = log_scale.detach()
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
