"""Packed-sequence LM with two optimizers: Muon for the matrices of the blocks, AdamW for everything else.

Documents are packed into rows of fixed length; attention is confined to a document, positions restart in it, and the
first token of a document is never a target of the one before.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 5 --out ckpt
"""

import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

VOCAB, ROW, MAXDOC = 31, 32, 14


def newton_schulz(g, iters=5):
    """Orthogonalises a full matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(iters):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    """The momentum is sharded like the parameter; only for the orthogonalisation is it gathered, one matrix at a time."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buf = state["momentum_buffer"].mul_(group["momentum"]).add_(p.grad)
                look = p.grad.add(buf, alpha=group["momentum"])
                full = look.redistribute(placements=[Replicate()] * p.device_mesh.ndim).to_local()
                update = newton_schulz(full) * max(1.0, full.shape[0] / full.shape[1]) ** 0.5
                p.add_(
                    distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None),
                    alpha=-float(group["lr"]),
                )


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x, mask):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.n2(x))).square())


class PackedLM(nn.Module):
    def __init__(self, d=32, heads=2, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(MAXDOC, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, ids, doc, pos):
        causal = torch.ones(ROW, ROW, dtype=torch.bool).tril()
        mask = (causal & (doc[:, :, None] == doc[:, None, :]))[:, None]
        x = self.tok(ids) + self.pos(pos)
        for b in self.blocks:
            x = b(x, mask)
        return self.head(self.norm(x))


def packed_rows(n_rows, seed):
    """Greedy packing; what is left of a row is padding with a document number of its own and no targets."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.zeros(n_rows, ROW, dtype=torch.long)
    doc, pos, labels = torch.zeros_like(ids), torch.zeros_like(ids), torch.full_like(ids, -100)
    for r in range(n_rows):
        at, number = 0, 0
        while True:
            n = int(torch.randint(5, MAXDOC + 1, (1,), generator=g))
            if at + n > ROW:
                break
            start, stride = torch.randint(1, 7, (2,), generator=g).tolist()
            tokens = (start * stride + stride * torch.arange(n)) % VOCAB
            ids[r, at : at + n], pos[r, at : at + n], doc[r, at : at + n] = tokens, torch.arange(n), number
            labels[r, at : at + n - 1] = tokens[1:]
            at, number = at + n, number + 1
        doc[r, at:] = number
    return ids, doc, pos, labels


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--rows", type=int, default=8, help="rows per step over all ranks")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    model = PackedLM()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    is_matrix = lambda n, p: n.startswith("blocks.") and p.ndim == 2
    muon = Muon([p for n, p in model.named_parameters() if is_matrix(n, p)], lr=0.02)
    adam = torch.optim.AdamW(
        [p for n, p in model.named_parameters() if not is_matrix(n, p)], lr=6e-3, betas=(0.9, 0.95)
    )
    opts = (muon, adam)
    base = [g["lr"] for o in opts for g in o.param_groups]

    step = 0
    if args.resume:
        newest = max(p for p in pathlib.Path(args.resume).iterdir() if (p / ".metadata").exists())
        msd, osd = get_state_dict(model, opts)
        state = {"model": msd, "optims": osd, "step": 0}
        dcp.load(state, checkpoint_id=str(newest))
        set_state_dict(model, opts, model_state_dict=state["model"], optim_state_dict=state["optims"])
        step = state["step"]

    data = packed_rows(120, seed=15)
    while step < args.steps:
        for lr, group in zip(base, [g for o in opts for g in o.param_groups]):
            group["lr"] = lr * min((step + 1) / 4, 1 - 0.9 * step / args.steps)
        rows = torch.randint(0, 120, (args.rows,), generator=torch.Generator().manual_seed(step))
        n_tokens = (data[3][rows] != -100).sum()
        ids, doc, pos, labels = (t[rows.chunk(world)[rank]] for t in data)
        logits = model(ids, doc, pos)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (nll * (world / n_tokens)).backward()
        for o in opts:
            o.step()
            o.zero_grad()
        step += 1
        shown = nll.detach() / n_tokens
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.4f} over {int(n_tokens)} tokens", flush=True)
        if args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opts)
            dcp.save(
                {"model": msd, "optims": osd, "step": step}, checkpoint_id=str(pathlib.Path(args.out) / f"{step:05d}")
            )

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
