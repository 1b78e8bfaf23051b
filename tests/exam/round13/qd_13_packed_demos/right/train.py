"""Imitation from demonstrations of very different length.

Episodes are dealt to the ranks by length and packed into micro-batches under a frame budget, so the ranks have different
numbers of micro-batches and of frames. Gradients are summed, not averaged, over the ranks; every frame has the weight
1 / (frames of the step).
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

OBS, ACT, EPISODES, FRAME_BUDGET, STEPS = 6, 2, 12, 24, 12


def options(argv):
    opts = {"save_at": "0", "out": "", "load": ""}
    for item in argv:
        key, _, value = item.partition("=")
        if key not in opts:
            raise SystemExit(f"unknown option {key}")
        opts[key] = value
    return opts


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(OBS, width), nn.ELU(), nn.LayerNorm(width))
        self.res = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))
        self.act = nn.Linear(width, ACT)

    def forward(self, obs):
        h = self.enc(obs)
        return self.act(h + self.res(h))


def episodes(step):
    g = torch.Generator().manual_seed(900 + step)
    gain = torch.randn(OBS, ACT, generator=torch.Generator().manual_seed(4))
    for n in torch.randint(2, 20, (EPISODES,), generator=g).tolist():
        obs = torch.randn(n, OBS, generator=g).cumsum(0) / 3
        yield obs, torch.tanh(obs @ gain)


def deal(eps, world):
    """Longest first to the rank with the fewest frames."""
    piles, load = [[] for _ in range(world)], [0] * world
    for e in sorted(eps, key=lambda e: -len(e[0])):
        r = load.index(min(load))
        piles[r].append(e)
        load[r] += len(e[0])
    return piles


def pack(pile):
    bins, size = [], FRAME_BUDGET + 1
    for obs, act in pile:
        if size + len(obs) > FRAME_BUDGET:
            bins.append([])
            size = 0
        bins[-1].append((obs, act))
        size += len(obs)
    return [(torch.cat([o for o, _ in b]), torch.cat([a for _, a in b])) for b in bins]


def main():
    opts = options(sys.argv[1:])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    model = Policy()
    fully_shard(model.res)
    fully_shard(model)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    start = 0
    if opts["load"]:
        ck = torch.load(os.path.join(opts["load"], "policy.pt"))
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["optim"], options=full)
        start = ck["step"]
    for step in range(start, STEPS):
        eps = list(episodes(step))
        frames = sum(len(o) for o, _ in eps)
        micro = pack(deal(eps, world)[rank])
        rounds = torch.tensor(len(micro))
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
        opt.zero_grad()
        total = torch.zeros(())
        for i in range(int(rounds)):
            model.set_requires_gradient_sync(i == int(rounds) - 1)
            # a rank that has run out of episodes goes on with one blank frame of weight zero
            obs, act = micro[i] if i < len(micro) else (torch.zeros(1, OBS), torch.zeros(1, ACT))
            weight = float(i < len(micro)) / frames
            loss = weight * (model(obs) - act).pow(2).sum()
            loss.backward()
            total += loss.detach()
        opt.step()
        dist.all_reduce(total)
        if rank == 0 and step % 2 == 1:
            print(f"step {step + 1} frames {frames} rounds {int(rounds)} loss per frame {total.item():.5f}", flush=True)
        if step + 1 == int(opts["save_at"]):
            m, o = get_state_dict(model, opt, options=full)
            if rank == 0:
                torch.save({"model": m, "optim": o, "step": step + 1}, os.path.join(opts["out"], "policy.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
