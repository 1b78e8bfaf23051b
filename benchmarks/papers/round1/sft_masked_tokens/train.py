# Supervised fine-tuning of a small decoder on prompt/answer pairs.
# Only answer tokens count; batches are accumulated over micro-batches.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

IGNORE = -100


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_a = nn.RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.ln_m = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        split = lambda z: z.view(b, t, self.heads, -1).transpose(1, 2)
        h = self.ln_a(x)
        k, v = self.kv(h).chunk(2, -1)
        a = F.scaled_dot_product_attention(split(self.q(h)), split(k), split(v), is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        h = self.ln_m(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocab, dim=32, heads=2, layers=2, max_len=40):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(max_len, dim)
        self.h = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(layers))
        self.ln_f = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Instructions:
    """Prompt of 4..8 symbols, answer: short (echo) or long (a counted run), by the first symbol."""

    def __init__(self, size, vocab, max_len, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(size):
            n = int(torch.randint(4, 9, (1,), generator=g))
            prompt = torch.randint(2, vocab, (n,), generator=g)
            long = bool(prompt[0] % 3 == 0)
            m = int(torch.randint(18, 28, (1,), generator=g)) if long else 2
            answer = (prompt[1] + torch.arange(m)) % (vocab - 2) + 2 if long else prompt[-2:]
            ids = torch.cat([prompt, answer, torch.ones(1, dtype=torch.long)])
            labels = torch.cat([torch.full((n,), IGNORE), ids[n:]])
            pad = max_len - len(ids)
            self.rows.append((F.pad(ids, (0, pad)), F.pad(labels, (0, pad), value=IGNORE)))

    def collate(self, index):
        ids, labels = zip(*(self.rows[i] for i in index))
        ids, labels = torch.stack(ids), torch.stack(labels)
        return ids[:, :-1], labels[:, 1:]


def token_loss(model, ids, labels):
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def perplexity(model, data, rank, world, device):
    model.eval()
    agg = torch.zeros(2, device=device)
    for start in range(0, len(data.rows), 16):
        index = list(range(start, start + 16))[rank::world]
        ids, labels = (t.to(device) for t in data.collate(index))
        agg[0] += token_loss(model, ids, labels)
        agg[1] += (labels != IGNORE).sum()
    dist.all_reduce(agg)
    model.train()
    return (agg[0] / agg[1]).exp().item()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch-size", type=int, default=16, help="samples per optimizer step")
    p.add_argument("--accumulate", type=int, default=2)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    p.add_argument("--vocab", type=int, default=40)
    p.add_argument("--max-len", type=int, default=40)
    args = p.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(2024)
    model = Decoder(args.vocab, max_len=args.max_len).to(device)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    train = Instructions(320, args.vocab, args.max_len, seed=1)
    valid = Instructions(64, args.vocab, args.max_len, seed=2)
    g = torch.Generator().manual_seed(8)
    stream = torch.cat([torch.randperm(320, generator=g) for _ in range(4)]).tolist()

    for step in range(args.steps):
        index = stream[step * args.batch_size:(step + 1) * args.batch_size][rank::world]
        size = len(index) // args.accumulate
        micro = [train.collate(index[i * size:(i + 1) * size]) for i in range(args.accumulate)]

        count = torch.tensor(float(sum((y != IGNORE).sum() for _, y in micro)), device=device)
        dist.all_reduce(count)
        count /= world

        running = torch.zeros((), device=device)
        for i, (ids, labels) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            loss = token_loss(model, ids.to(device), labels.to(device)) / count
            loss.backward()
            running += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optim.step()
        optim.zero_grad()

        if (step + 1) % 5 == 0:
            dist.all_reduce(running)
            norm = norm.full_tensor()
            if rank == 0:
                print(f"step {step + 1:3d}  loss {running.item() / world:.5f}  grad_norm {norm.item():.4f}", flush=True)

    ppl = perplexity(model, valid, rank, world, device)
    model.reshard()
    head = model.lm_head.weight.full_tensor().norm()
    if rank == 0:
        print(f"validation perplexity {ppl:.5f}  |lm_head| {head.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
