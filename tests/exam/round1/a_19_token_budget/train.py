"""Length-curriculum LM with a token budget: the documents of a step are dealt to the ranks by length (longest first to the
emptiest rank), each rank packs its own into rows of at most ROW tokens. Ranks may have different numbers of rows: those with
fewer go through dummy rows of weight zero, so that all ranks make the same number of passes.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 4 --out ckpt
"""

import argparse
import heapq
import os

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
from torch.distributed.fsdp import fully_shard

VOCAB, ROW, LONGEST = 28, 40, 24


class Block(nn.Module):
    def __init__(self, d=32, heads=2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, mask):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(0, 1) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1))
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(LONGEST, d)
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, ids, doc, pos):
        """One packed row without padding: ids, doc, pos of shape (tokens,)."""
        mask = (doc[:, None] == doc[None]).tril()
        x = self.tok(ids) + self.pos(pos)
        for b in self.blocks:
            x = b(x, mask)
        return self.head(self.norm(x))


def corpus(n=400):
    g = torch.Generator().manual_seed(60)
    docs = []
    for _ in range(n):
        length = int(torch.randint(4, LONGEST + 2, (1,), generator=g))
        a, b = torch.randint(1, 5, (2,), generator=g).tolist()
        docs.append(torch.cumsum(torch.tensor([a, b] * length)[:length], 0) % VOCAB)
    return docs


def pick_documents(docs, step, steps, n):
    """The longest admitted document grows from 8 tokens to the full length over the first half of the training."""
    limit = min(LONGEST + 1, 8 + int((LONGEST - 7) * 2 * step / steps))
    admitted = [i for i, d in enumerate(docs) if len(d) <= limit]
    g = torch.Generator().manual_seed(7_000 + step)
    return [admitted[k] for k in torch.randperm(len(admitted), generator=g)[:n].tolist()], limit


def deal(lengths, world):
    """Longest processing time first; ties by rank number, so that all ranks come to the same result."""
    heap = [(0, r) for r in range(world)]
    hands = [[] for _ in range(world)]
    for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
        load, r = heapq.heappop(heap)
        hands[r].append(i)
        heapq.heappush(heap, (load + lengths[i], r))
    return hands


def pack(indices, lengths):
    rows, room = [], 0
    for i in indices:
        if not rows or lengths[i] > room:
            rows.append([])
            room = ROW
        rows[-1].append(i)
        room -= lengths[i]
    return rows


def tensors(row, docs):
    ids = torch.cat([docs[i][:-1] for i in row])
    labels = torch.cat([docs[i][1:] for i in row])
    doc = torch.cat([torch.full((len(docs[i]) - 1,), k) for k, i in enumerate(row)])
    pos = torch.cat([torch.arange(len(docs[i]) - 1) for i in row])
    return ids, doc, pos, labels


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--docs", type=int, default=14, help="documents per step over all ranks")
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(44)
    model = LM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps - 4),
        ],
        milestones=[4],
    )
    docs, step = corpus(), 0
    if args.resume:
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "opt": osd, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        step = state["step"]

    while step < args.steps:
        chosen, limit = pick_documents(docs, step, args.steps, args.docs)
        lengths = {i: len(docs[i]) - 1 for i in chosen}
        hands = [pack(h, lengths) for h in deal(lengths, world)]
        passes, tokens = max(map(len, hands)), sum(lengths.values())
        mine = hands[rank]
        total = torch.zeros(())
        for k in range(passes):
            dummy = k >= len(mine)
            ids, doc, pos, labels = tensors(mine[k] if not dummy else [chosen[0]], docs)
            model.set_requires_gradient_sync(k + 1 == passes)
            nll = F.cross_entropy(model(ids, doc, pos), labels, reduction="sum") * (0.0 if dummy else 1.0)
            (nll * world / tokens).backward()
            total += nll.detach() / tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(total)
        if rank == 0:
            print(
                f"step {step} loss {total.item():.4f} tokens {tokens} limit {limit} rows {[len(h) for h in hands]}",
                flush=True,
            )
        if args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save(
                {"model": msd, "opt": osd, "sched": sched.state_dict(), "step": step},
                checkpoint_id=os.path.join(args.out, f"c{step:05d}"),
            )

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
