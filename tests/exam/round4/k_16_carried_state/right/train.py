"""Truncated back-propagation through time on long streams: the recurrent state is carried from step to step and is
a part of the checkpoint. Each of the global lanes is a long stream of its own; a rank holds some of the lanes."""
import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LANES, CHUNK, STREAM = 24, 8, 12, 601


def streams():
    """A token is the last one plus a hidden stride; the stride of a lane changes rarely and must be remembered."""
    g = torch.Generator().manual_seed(99)
    out = torch.zeros(LANES, STREAM, dtype=torch.long)
    for lane in range(LANES):
        tok, stride = int(torch.randint(VOCAB, (1,), generator=g)), 1
        for t in range(STREAM):
            if t % 50 == 7 * lane % 50:
                stride = int(torch.randint(1, 5, (1,), generator=g))
            out[lane, t] = tok
            tok = (tok + stride) % VOCAB
    return out


class Cell(nn.Module):
    """One layer of a minimal gated recurrence, run over a chunk."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.to_gates = nn.Linear(2 * dim, 2 * dim)

    def forward(self, x, h):
        y, outs = self.norm(x), []
        for t in range(x.shape[1]):
            a, b = self.to_gates(torch.cat([y[:, t], h], -1)).chunk(2, -1)
            keep = torch.sigmoid(a)
            h = keep * h + (1 - keep) * torch.tanh(b)
            outs.append(h)
        return x + torch.stack(outs, 1), h


class RecurrentLM(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.cells = nn.ModuleList(Cell(dim) for _ in range(depth))
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids, state):
        x, new = self.emb(ids), []
        for cell, h in zip(self.cells, state):
            x, h = cell(x, h)
            new.append(h)
        return self.out(x), torch.stack(new)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    per = LANES // world
    mine = slice(rank * per, (rank + 1) * per)
    text = streams()[mine]

    torch.manual_seed(15)
    model = RecurrentLM()
    for c in model.cells:
        fully_shard(c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.RMSprop(model.parameters(), lr=a.lr, alpha=0.95, eps=1e-4)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)

    state, pos, step = torch.zeros(2, per, 24), 0, 0
    if a.resume:
        path = os.path.join(a.resume, sorted(os.listdir(a.resume))[-1], "all.pt")
        ck = torch.load(path, map_location="cpu")
        set_model_state_dict(model, ck["model"], options=full)
        set_optimizer_state_dict(model, opt, ck["opt"], options=full)
        state, pos, step = ck["state"][:, mine].clone(), ck["pos"], ck["step"]   # the state is kept by global lane

    while step < a.steps:
        if pos + CHUNK + 1 > STREAM:
            state, pos = torch.zeros_like(state), 0
        x, y = text[:, pos:pos + CHUNK], text[:, pos + 1:pos + CHUNK + 1]
        logits, new_state = model(x, state)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        state, pos, step = new_state.detach(), pos + CHUNK, step + 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)

        if a.out and a.save_every and step % a.save_every == 0:
            lanes = [torch.empty_like(state) for _ in range(world)]
            dist.all_gather(lanes, state.contiguous())
            m = get_model_state_dict(model, options=full)
            o = get_optimizer_state_dict(model, opt, options=full)
            if rank == 0:
                tmp, final = os.path.join(a.out, "..", f".tmp_{os.getpid()}"), os.path.join(a.out, f"tbptt_{step:05d}")
                os.makedirs(a.out, exist_ok=True)
                os.makedirs(tmp)
                torch.save({"model": m, "opt": o, "state": torch.cat(lanes, 1), "pos": pos, "step": step}, os.path.join(tmp, "all.pt"))
                shutil.rmtree(final, ignore_errors=True)
                os.rename(tmp, final)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
