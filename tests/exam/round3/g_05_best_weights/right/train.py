"""Fine-tuning on very little text. It overfits soon, so the weights with the lowest validation loss are written, not the last ones."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, DIM, CONTEXT, BATCH = 64, 32, 16, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 4, batch_first=True, bias=False)
        self.ln_2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, mask):
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.wpe = nn.Embedding(CONTEXT, DIM)
        self.h = nn.ModuleList(Layer() for _ in range(depth))
        self.ln_f = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.apply(self.init)

    def tie_weights(self):
        self.lm_head.weight = self.wte.weight
        return self

    @staticmethod
    def init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.08)

    def forward(self, ids, targets):
        t = ids.shape[1]
        mask = torch.full((t, t), float("-inf")).triu(1)
        x = self.wte(ids) + self.wpe(torch.arange(t))
        for layer in self.h:
            x = layer(x, mask)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def make_stream(n=12_000, seed=3):
    """tokens of a walk: 85 % of the time the successor under a fixed permutation, otherwise a Zipf draw"""
    g = torch.Generator().manual_seed(seed)
    successor = torch.randperm(VOCAB, generator=g).tolist()
    zipf = torch.multinomial(1.0 / torch.arange(1, VOCAB + 1), n, replacement=True, generator=g).tolist()
    stay = (torch.rand(n, generator=g) < 0.85).tolist()
    out = [0]
    for i in range(1, n):
        out.append(successor[out[-1]] if stay[i] else zipf[i])
    return torch.tensor(out)


def shard_model(model, mesh):
    for layer in model.h:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def pick(stream, starts):
    rows = torch.stack([stream[s : s + CONTEXT + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def validation_loss(model, stream, rank, world):
    starts = torch.arange(0, 64 * CONTEXT, CONTEXT)
    loss = model(*pick(stream, starts.chunk(world)[rank]))
    dist.all_reduce(loss)
    return loss.item() / world


class Best:
    """remembers the sharded weights of the best validation"""

    def __init__(self):
        self.loss, self.step, self.weights = math.inf, 0, None

    def offer(self, loss, step, model):
        if loss < self.loss:
            self.loss, self.step = loss, step
            self.weights = {name: w.clone() for name, w in model.state_dict().items()}
            return True
        return False

    def gathered(self):
        return {name: w.full_tensor() for name, w in self.weights.items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--val-every", type=int, default=2)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = shard_model(GPT().tie_weights(), init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    stream = make_stream()
    train, valid = stream[:100], stream[2000:]
    order = torch.Generator().manual_seed(77)
    best = Best()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 5)
        starts = torch.randint(0, len(train) - CONTEXT - 1, (BATCH,), generator=order).view(world, -1)[rank]
        loss = model(*pick(train, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if step % args.val_every == 0:
            val = validation_loss(model, valid, rank, world)
            mark = "  *" if best.offer(val, step, model) else ""
            if rank == 0:
                print(f"iter {step}: train {loss.item() / world:.4f} valid {val:.4f}{mark}")

    weights = best.gathered()
    if rank == 0:
        print(f"best validation loss {best.loss:.4f} at iter {best.step}")
        if args.export:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
