"""Next-event model for support-ticket streams, trained epoch-wise with gradient accumulation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, WIDTH = 32, 12, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.ln2(x))


class EventModel(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for layer in self.layers:
            x = layer(x)
        return self.out(x).transpose(1, 2).contiguous()


def build_corpus(n):
    g = torch.Generator().manual_seed(77)
    table = torch.randint(0, VOCAB, (VOCAB, 2), generator=g)
    rows = [torch.randint(0, VOCAB, (n,), generator=g)]
    for _ in range(SEQ):
        pick = (torch.rand(n, generator=g) < 0.25).long()
        rows.append(table[rows[-1], pick])
    return torch.stack(rows, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--micro-batch", type=int, default=16, help="rows of a micro-batch over all ranks")
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--checkpoints", default=None)
    ap.add_argument("--checkpoint-epochs", type=int, default=0)
    ap.add_argument("--restore", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    model = EventModel(depth=2)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.05)
    corpus = build_corpus(160)
    micro_batches = len(corpus) // args.micro_batch

    first_epoch = 0
    if args.restore:
        last = max(int(d) for d in os.listdir(args.restore))
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optimizer": o, "epoch": 0}
        dcp.load(state, checkpoint_id=f"{args.restore}/{last}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first_epoch = state["epoch"]

    for epoch in range(first_epoch, args.epochs):
        order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(epoch))
        seen = torch.zeros(())
        for i in range(micro_batches):
            rows = order[i * args.micro_batch:(i + 1) * args.micro_batch].chunk(world)[rank]
            ids, target = corpus[rows, :-1], corpus[rows, 1:]
            # the last window of an epoch may hold fewer micro-batches than the others
            opened = i - i % args.accumulate
            window = min(args.accumulate, micro_batches - opened)
            closes = i + 1 == opened + window
            model.set_requires_gradient_sync(closes)
            loss = F.cross_entropy(model(ids), target)
            (loss / window).backward()
            seen += loss.detach()
            if closes:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} loss {seen.item() / world / micro_batches:.4f}", flush=True)
        if args.checkpoint_epochs and (epoch + 1) % args.checkpoint_epochs == 0 and epoch + 1 < args.epochs:
            m, o = get_state_dict(model, optimizer)
            dcp.save({"model": m, "optimizer": o, "epoch": epoch + 1}, checkpoint_id=f"{args.checkpoints}/{epoch + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
