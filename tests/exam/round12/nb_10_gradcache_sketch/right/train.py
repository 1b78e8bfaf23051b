import os
from argparse import ArgumentParser
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from gradcache import contrastive_backward
from towers import Tower


@dataclass
class Settings:
    steps: int = 24
    batch: int = 32
    chunk: int = 4
    lr: float = 3e-3
    scale_lr: float = 2e-2


class Pairs:
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(21)
        latent = torch.randn(n, 12, generator=g)
        to_photo = torch.randn(12, 3 * 144, generator=g) / 12 ** 0.5
        to_sketch = torch.randn(12, 144, generator=g) / 12 ** 0.5
        self.photo = torch.tanh(latent @ to_photo).view(n, 3, 12, 12)
        self.sketch = (latent @ to_sketch > 0.3).float().view(n, 1, 12, 12)

    def batch(self, step, size, rank, world):
        order = torch.randperm(len(self.photo), generator=torch.Generator().manual_seed(step))[:size]
        part = order.chunk(world)[rank]
        return self.photo[part], self.sketch[part]


def main():
    ap = ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    cfg = Settings()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(7)
    towers = nn.ModuleDict({"photo": Tower(3).shard(), "sketch": Tower(1).shard()})
    log_scale = nn.Parameter(torch.tensor(1.5))
    opt = torch.optim.AdamW(towers.parameters(), lr=cfg.lr, eps=1e-6, weight_decay=0.01)
    scale_opt = torch.optim.SGD([log_scale], lr=cfg.scale_lr)
    data, start = Pairs(), 0

    def state(step):
        return {"towers": towers.state_dict(), "opt": get_optimizer_state_dict(towers, opt),
                "log_scale": log_scale.detach(), "step": torch.tensor(step)}

    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        s = state(0)
        dcp.load(s, checkpoint_id=os.path.join(args.resume, newest))
        towers.load_state_dict(s["towers"])
        set_optimizer_state_dict(towers, opt, s["opt"])
        start = int(s["step"])

    for step in range(start, cfg.steps):
        photos, sketches = data.batch(step, cfg.batch, rank, world)
        loss = contrastive_backward(towers["photo"], towers["sketch"], log_scale, photos, sketches, cfg.chunk)
        opt.step()
        scale_opt.step()
        opt.zero_grad()
        scale_opt.zero_grad()
        with torch.no_grad():
            log_scale.clamp_(max=4.6)
        if rank == 0 and (step % 4 == 0 or step == cfg.steps - 1):
            print(f"[{step:03d}] loss={loss.item():.5f} scale={log_scale.exp().item():.5f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.out, f"{step + 1:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
