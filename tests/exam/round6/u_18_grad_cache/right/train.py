"""Two-tower retrieval for a shop: users and items, contrastive loss on the whole batch through a gradient cache."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from cache import cached_step

STEPS, BATCH, CHUNK = 14, 48, 6


class Tower(nn.Module):
    def __init__(self, vocab, dim=24):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, 12))
        fully_shard(self.mlp)

    def forward(self, ids):
        return F.normalize(self.mlp(self.bag(ids)), dim=1)


def visits(gen):
    """A user's history and an item's tags share a taste."""
    taste = torch.randint(0, 50, (BATCH, 1), generator=gen)
    users = (taste * 3 + torch.randint(0, 6, (BATCH, 5), generator=gen)) % 150
    items = (taste * 2 + torch.randint(0, 4, (BATCH, 3), generator=gen)) % 100
    return users, items


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(44)
    users, items = fully_shard(Tower(150)), fully_shard(Tower(100))
    both = nn.ModuleDict({"user_tower": users, "item_tower": items})
    # the embedding tables are trained with Adagrad, the rest with AdamW
    tables = [users.bag.weight, items.bag.weight]
    dense = [p for n, p in both.named_parameters() if "bag" not in n]
    opts = [torch.optim.Adagrad(tables, lr=0.3), torch.optim.AdamW(dense, lr=5e-3)]
    gen = torch.Generator().manual_seed(45)
    step = 0

    def state():
        m, o = get_state_dict(both, opts)
        return {"m": m, "o": o, "gen": gen.get_state(), "step": step}

    if args.resume:
        sd = state()
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume), key=lambda s: int(s[4:]))))
        set_state_dict(both, opts, model_state_dict=sd["m"], optim_state_dict=sd["o"])
        gen.set_state(sd["gen"])
        step = sd["step"]

    while step < STEPS:
        u, v = (t.chunk(world)[rank] for t in visits(gen))
        chunks = list(zip(u.split(CHUNK), v.split(CHUNK)))
        temperature = 0.2 - 0.1 * step / STEPS
        for o in opts:
            o.zero_grad()
        loss = cached_step((users, items), chunks, temperature)
        for o in opts:
            o.step()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, f"step{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
