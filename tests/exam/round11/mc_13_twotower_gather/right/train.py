"""Two-tower retrieval with the negatives of the global batch."""
import argparse
import os
from itertools import count

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from gather import gather_rows
from rowwise import RowwiseAdagrad
from towers import Popularity, Towers


def clicks(users=120, items=90, n=1600, seed=8):
    g = torch.Generator().manual_seed(seed)
    taste = torch.randn(users, 4, generator=g) @ torch.randn(4, items, generator=g)
    popular = 1.5 / torch.arange(1, items + 1).sqrt()
    who = torch.randint(users, (n,), generator=g)
    what = torch.multinomial((taste[who] + 2 * popular).softmax(-1), 1, generator=g)[:, 0]
    return who, what


def stream(n, batch, seed):
    for epoch in count():
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        yield from order[: n // batch * batch].split(batch)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=80)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    who, what = clicks()
    torch.manual_seed(3)
    model = Towers()
    fully_shard(model.user_mlp)
    fully_shard(model.item_mlp)
    fully_shard(model)
    tables = [model.users.weight, model.items.weight]
    dense = [p for n, p in model.named_parameters() if "mlp" in n]
    optims = {
        "tables": RowwiseAdagrad(tables, lr=0.05),
        "dense": torch.optim.AdamW(dense, lr=3e-3, eps=1e-6),
        "temp": torch.optim.SGD([model.log_temp], lr=0.02),
    }
    popularity = Popularity(90)

    done = 0
    if args.resume:
        folder = os.path.join(args.resume, max(os.listdir(args.resume)))
        s = torch.load(os.path.join(folder, f"rank{rank}.pt"), weights_only=False)
        model.load_state_dict(s["model"])
        for name, o in optims.items():
            o.load_state_dict(s["optims"][name])
        popularity.freq, done = s["freq"], s["step"]

    share = args.batch // world
    for step, rows in enumerate(stream(len(who), args.batch, seed=30), start=1):
        if step > args.steps:
            break
        if step <= done:
            continue
        all_items = what[rows]
        mine = slice(rank * share, (rank + 1) * share)
        a, b, temp = model(who[rows[mine]], all_items[mine])
        b_all = gather_rows(b)
        logits = a @ b_all.T / temp - popularity.log_q(all_items)
        own = torch.arange(rank * share, (rank + 1) * share)
        # the same item elsewhere in the batch is no negative
        same = all_items[mine][:, None] == all_items[None, :]
        same[torch.arange(share), own] = False
        loss = F.cross_entropy(logits.masked_fill(same, float("-inf")), own)
        for o in optims.values():
            o.zero_grad()
        loss.backward()
        for o in optims.values():
            o.step()
        popularity.update(all_items)

        if step % 3 == 0:
            t = loss.detach().clone()
            dist.all_reduce(t)
            if rank == 0:
                print(f"step {step} loss {t.item() / world:.6f}")
        if args.save_every and step % args.save_every == 0:
            folder = os.path.join(args.out, f"step{step:05d}")
            os.makedirs(folder, exist_ok=True)
            torch.save({"model": model.state_dict(), "optims": {k: o.state_dict() for k, o in optims.items()},
                        "freq": popularity.freq, "step": step}, os.path.join(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
