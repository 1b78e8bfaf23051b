"""Session based next-item model (sharded), large batch, LAMB optimizer written by hand."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

ITEMS, SESSION, DIM = 48, 8, 24


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @staticmethod
    def norm(shard):
        square = shard.pow(2).sum()
        dist.all_reduce(square)
        return square.sqrt()

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["step"] = torch.zeros(())
                    st["m"], st["v"] = torch.zeros_like(p), torch.zeros_like(p)
                st["step"] += 1
                t = st["step"].item()
                w, g, m, v = (x.to_local() for x in (p, p.grad, st["m"], st["v"]))
                m.lerp_(g, 1 - b1)
                v.mul_(b2).addcmul_(g, g, value=1 - b2)
                update = (m / (1 - b1 ** t)) / ((v / (1 - b2 ** t)).sqrt() + group["eps"])
                update = update + group["weight_decay"] * w
                wn, un = self.norm(w), self.norm(update)
                trust = torch.where((wn > 0) & (un > 0), wn / un.clamp_min(1e-12), torch.ones_like(wn))
                w.sub_(group["lr"] * trust * update)
        return loss


class NextItem(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        self.place = nn.Embedding(SESSION, DIM)
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(2))
        self.out = nn.Linear(DIM, ITEMS)

    def forward(self, session):
        x = self.items(session) + self.place.weight
        x = x.cumsum(1) / torch.arange(1, SESSION + 1)[:, None] + x
        for layer in self.hidden:
            x = x + layer(x)
        return self.out(x)


def sessions(n=1024, seed=8):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, ITEMS, (n, 1), generator=g)
    jumps = torch.randint(1, 4, (n, 1), generator=g)
    s = (start + jumps * torch.arange(SESSION + 1)) % ITEMS
    noise = torch.rand(s.shape, generator=g) < 0.05
    return torch.where(noise, torch.randint(0, ITEMS, s.shape, generator=g), s)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = NextItem()
    for layer in model.hidden:
        fully_shard(layer)
    fully_shard(model)
    opt = Lamb(model.parameters(), lr=args.lr)
    data = sessions()

    step = 0
    if args.resume:
        name = sorted(d for d in os.listdir(args.resume) if d.startswith("lamb-"))[-1]
        m, o = get_state_dict(model, opt)
        state = {"m": m, "o": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, name))
        set_state_dict(model, opt, model_state_dict=state["m"], optim_state_dict=state["o"])
        step = state["step"]

    for step in range(step, args.steps):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step // 8))
        batch = data[order[(step % 8) * args.global_batch:][: args.global_batch].chunk(world)[rank]]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item():.4f}", flush=True)
        if args.save_every and args.out and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o, "step": step + 1}, checkpoint_id=os.path.join(args.out, f"lamb-{step + 1:05d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
