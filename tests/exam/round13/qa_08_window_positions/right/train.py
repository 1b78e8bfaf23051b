"""Training on windows out of long documents, rotary positions counted from the start of the document, bfloat16."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, DIM, HEADS, WINDOW, LAG = 24, 32, 2, 24, 2


def rotate(x, positions):
    half = x.shape[-1] // 2
    freq = 2.0 ** -torch.arange(half, dtype=torch.float32)
    angle = positions.float()[:, None, :, None] * freq
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, positions):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x))


class LongLM(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, positions):
        x = self.tok(ids)
        for b in self.blocks:
            x = b(x, positions)
        return self.head(self.norm(x))


def windows(step, rows):
    """Each token repeats the one LAG places before it, four times out of five."""
    g = torch.Generator().manual_seed(900 + step)
    start = torch.randint(0, 4000, (rows, 1), generator=g)
    ids = torch.randint(0, VOCAB, (rows, WINDOW + 1), generator=g)
    fresh = torch.rand(ids.shape, generator=g) < 0.2
    for t in range(LAG, WINDOW + 1):
        ids[:, t] = torch.where(fresh[:, t], ids[:, t], ids[:, t - LAG])
    positions = start + torch.arange(WINDOW)
    return ids, positions


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--rows", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LongLM()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for b in model.blocks:
        fully_shard(b, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, eps=1e-6)

    begin = 0
    if a.resume:
        begin = max(int(n[1:]) for n in os.listdir(a.resume))
        m, o = get_state_dict(model, opt)
        dcp.load({"m": m, "o": o}, checkpoint_id=f"{a.resume}/s{begin}")
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)

    for step in range(begin, a.steps):
        ids, positions = windows(step, a.rows)
        ids, positions = ids[rank::world], positions[rank::world]
        logits = model(ids[:, :-1], positions).float()
        loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1} loss {mean:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0 and step + 1 < a.steps:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o}, checkpoint_id=f"{a.out}/s{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
