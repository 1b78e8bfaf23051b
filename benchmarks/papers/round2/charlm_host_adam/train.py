"""Byte-level language model; Adam and its copy of the weights live in host memory.

Every rank keeps the optimizer's fp32 copy of its own shards on the host (ZeRO-offload
style). After a step the new values go back to the device unit by unit, right before the
unit's next forward, so the transfer of one unit overlaps with the compute of the last.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

TEXT = (
    "the sharded model trains on many machines and every machine keeps a part of the weights. "
    "before a layer runs its weights are gathered, after it runs they are freed again. "
    "gradients are reduced and scattered, so that the optimizer sees only its own part. "
)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class ByteLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, seq):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class HostAdam:
    """AdamW over host copies of the local shards."""

    def __init__(self, model, units, lr):
        self.params = list(model.parameters())
        self.copies = [p.detach().to_local().to("cpu", torch.float32, copy=True) for p in self.params]
        self.adam = torch.optim.AdamW(self.copies, lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
        by_param = dict(zip(self.params, self.copies))
        for unit in units:
            own = self._own_params(unit)
            pairs = [(p, by_param[p]) for p in own]
            unit.register_forward_pre_hook(self._loader(unit, pairs), prepend=True)
            unit.fresh = True

    @staticmethod
    def _own_params(unit):
        """Parameters that the unit itself gathers, without those of units inside it."""
        inner = {p for m in unit.modules() if m is not unit and isinstance(m, FSDPModule) for p in m.parameters()}
        return [p for p in unit.parameters() if p not in inner]

    def _loader(self, unit, pairs):
        def hook(module, args):
            if not unit.fresh:
                with torch.no_grad():
                    for p, copy in pairs:
                        p.to_local().copy_(copy, non_blocking=True)
                unit.fresh = True
        return hook

    def step(self, units):
        for p, copy in zip(self.params, self.copies):
            copy.grad = p.grad.to_local().to("cpu", torch.float32)
            p.grad = None
        self.adam.step()
        for unit in units:
            unit.fresh = False


def windows(data, seq, batch, step, seed):
    g = torch.Generator().manual_seed(seed + step)
    starts = torch.randint(0, len(data) - seq - 1, (batch,), generator=g)
    chunk = torch.stack([data[s:s + seq + 1] for s in starts.tolist()])
    return chunk[:, :-1], chunk[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dim", type=int, default=32)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--seq", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--eval-every", type=int, default=12)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(c) for c in TEXT * 4])
    torch.manual_seed(21)
    model = ByteLM(len(chars), args.dim, args.heads, args.layers, args.seq).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    units = [model, *model.blocks]
    opt = HostAdam(model, units, args.lr)

    n = args.batch // world
    mine = slice(rank * n, (rank + 1) * n)

    @torch.no_grad()
    def evaluate():
        model.eval()
        total = torch.zeros((), device=device)
        for i in range(4):
            x, y = (t[mine].to(device) for t in windows(data, args.seq, args.batch, i, 90_000))
            total += F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        dist.all_reduce(total)
        model.train()
        return total.item() / (4 * world)

    for step in range(1, args.steps + 1):
        x, y = (t[mine].to(device) for t in windows(data, args.seq, args.batch, step, 1_000))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step(units)
        if step % args.eval_every == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            held_out = evaluate()
            if rank == 0:
                print(f"step {step:3d}  train {shown.item() / world:.5f}  held out {held_out:.5f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
