"""ReLoRA: a language model is trained through a sequence of low-rank updates. At the end of each phase the adapters are
folded into the frozen weights, drawn anew, and their optimizer state is dropped; the learning rate warms up again."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

VOCAB, DIM, LENGTH, BATCH = 32, 32, 20, 16
STEPS, PHASE, WARMUP, LR = 30, 8, 3, 1e-2


class LowRank(nn.Module):
    def __init__(self, inp, out, rank=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inp) * inp**-0.5, requires_grad=False)
        self.a = nn.Parameter(torch.empty(rank, inp))
        self.b = nn.Parameter(torch.zeros(out, rank))
        nn.init.uniform_(self.a, -(inp**-0.5), inp**-0.5)

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b)

    @torch.no_grad()
    def fold(self, generator):
        a, b = (p.full_tensor() if isinstance(p, DTensor) else p for p in (self.a, self.b))
        delta = b @ a
        fresh = torch.empty(self.a.shape).uniform_(-(a.shape[1] ** -0.5), a.shape[1] ** -0.5, generator=generator)
        if isinstance(self.weight, DTensor):
            delta = distribute_tensor(delta, self.weight.device_mesh, self.weight.placements)
            fresh = distribute_tensor(fresh, self.a.device_mesh, self.a.placements)
        self.weight.add_(delta)
        self.a.copy_(fresh)
        self.b.zero_()


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate, self.value, self.out = LowRank(DIM, DIM), LowRank(DIM, DIM), LowRank(DIM, DIM)

    def forward(self, x):
        h = self.norm(x)
        steps = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        past = (torch.sigmoid(self.gate(h)) * self.value(h)).cumsum(1) / steps.sqrt()
        return x + self.out(past)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.mixers = nn.ModuleList(Mixer() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for m in self.mixers:
            x = m(x)
        return self.head(x)


def text(step, rank, world):
    g = torch.Generator().manual_seed(step * 13 + 1)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    seq = (start + torch.arange(LENGTH + 1) * 3) % VOCAB
    noise = torch.rand(seq.shape, generator=g) < 0.05
    seq = torch.where(noise, torch.randint(0, VOCAB, seq.shape, generator=g), seq)
    mine = seq.chunk(world)[rank]
    return mine[:, :-1], mine[:, 1:]


def jagged_lr(step):
    into = step % PHASE
    warm = min(1.0, (into + 1) / WARMUP)
    return LR * warm * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


def restart(model, optim, phase):
    generator = torch.Generator().manual_seed(1000 + phase)
    for m in model.modules():
        if isinstance(m, LowRank):
            m.fold(generator)
            for p in (m.a, m.b):
                state = optim.state[p]
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
                state["step"].zero_()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40)
    model = LM()
    for m in model.mixers:
        fully_shard(m)
    fully_shard(model)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=1e-6)

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n[1:]))
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < STEPS:
        for group in optim.param_groups:
            group["lr"] = jagged_lr(step)
        x, y = text(step, rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if step % PHASE == 0:
            restart(model, optim, step // PHASE)
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} phase {step // PHASE} loss {value.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(args.out, f"s{step}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
