"""Recommender fitted in turns, in the manner of alternating least squares: some steps for the user side with the item side
frozen, then the other way round. Which side is open follows from the step number alone."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

USERS, ITEMS, DIM = 80, 60, 12


class Side(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.vector = nn.Embedding(count, DIM)
        self.bias = nn.Embedding(count, 1)
        self.refine = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        nn.init.normal_(self.vector.weight, std=0.3)
        nn.init.zeros_(self.bias.weight)

    def forward(self, i):
        v = self.vector(i)
        return v + self.refine(v), self.bias(i).squeeze(-1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Side(USERS), Side(ITEMS)
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, u, i):
        (pu, bu), (qi, bi) = self.user(u), self.item(i)
        return self.mean + bu + bi + (pu * qi).sum(-1)


def make_ratings(n=3000, seed=61):
    g = torch.Generator().manual_seed(seed)
    p, q = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    u, i = torch.randint(0, USERS, (n,), generator=g), torch.randint(0, ITEMS, (n,), generator=g)
    r = 1.5 + p[u, 0] * 0.7 + q[i, 1] * 0.7 + 0.6 * (p[u] * q[i]).sum(1) + 0.1 * torch.randn(n, generator=g)
    popularity = torch.bincount(i, minlength=ITEMS).float()
    return u, i, r, popularity.reciprocal().clamp_max(1.0)[i]


class Turns:
    """Opens one side and closes the other."""

    def __init__(self, sides, length):
        self.sides, self.length, self.names = sides, length, list(sides)

    def open_for(self, step):
        name = self.names[(step // self.length) % len(self.names)]
        for n, module in self.sides.items():
            module.requires_grad_(n == name)
        return name


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--turn", type=int, default=4)
    p.add_argument("--global-batch", type=int, default=256)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Pair()
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    opts = {
        "user": torch.optim.Adam(model.user.parameters(), lr=3e-2),
        "item": torch.optim.Adam(model.item.parameters(), lr=3e-2),
        "mean": torch.optim.SGD([model.mean], lr=0.1, momentum=0.5),
    }
    turns = Turns({"user": model.user, "item": model.item}, args.turn)
    u, i, r, weight = make_ratings()

    def tree(step):
        return {"model": get_model_state_dict(model), "step": step,
                **{f"opt_{n}": o.state_dict()["state"] for n, o in opts.items()}}

    def fill_states():
        """Gives every optimizer its (zero) state, so that there is something to load into."""
        for n in opts:
            for g in opts[n].param_groups:
                for q in g["params"]:
                    if not opts[n].state[q]:
                        if n == "mean":
                            opts[n].state[q] = {"momentum_buffer": torch.zeros_like(q)}
                        else:
                            opts[n].state[q] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(q), "exp_avg_sq": torch.zeros_like(q)}

    fill_states()
    step = 0
    if args.resume:
        st = tree(0)
        dcp.load(st, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_model_state_dict(model, st["model"])
        for n, o in opts.items():
            o.load_state_dict({"state": st[f"opt_{n}"], "param_groups": o.state_dict()["param_groups"]})
        step = st["step"]

    while step < args.steps:
        side = turns.open_for(step)
        g = torch.Generator().manual_seed(step)
        pick = torch.randperm(len(r), generator=g)[: args.global_batch]
        scale = weight[pick].sum()
        pick = pick.chunk(world)[rank]
        error = (model(u[pick], i[pick]) - r[pick]).square()
        loss = (weight[pick] * error).sum() / scale * world
        for o in opts.values():
            o.zero_grad(set_to_none=True)
        loss.backward()
        opts[side].step()
        opts["mean"].step()
        step += 1
        shown = torch.stack([loss.detach(), error.detach().mean()]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} side {side} weighted {shown[0]:.4f} mse {shown[1]:.4f}", flush=True)
        if args.save_every and args.out and step % args.save_every == 0:
            dcp.save(tree(step), checkpoint_id=os.path.join(args.out, f"turns_{step:05d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
