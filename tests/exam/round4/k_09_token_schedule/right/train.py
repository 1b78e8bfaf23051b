"""Supervised fine-tuning on conversations of very different length. The learning rate follows the number of
trained tokens and not the number of steps; the loss is the mean over all answer tokens of the global batch."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, MAXLEN, IGNORE = 34, 40, -100


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.ff1, self.ff2 = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        y = self.norm_a(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True))
        return x + self.ff2(F.relu(self.ff1(self.norm_b(x))).square())


class ChatLM(nn.Module):
    def __init__(self, d=24, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(MAXLEN, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def conversation(i):
    """A prompt of 3 tokens, then an answer of 2 to 36 tokens that counts on from the end of the prompt."""
    g = torch.Generator().manual_seed(i)
    prompt = torch.randint(1, VOCAB, (3,), generator=g)
    n = int(2 + 34 * torch.rand(1, generator=g).item() ** 3)
    answer = 1 + (prompt[2] + torch.arange(n)) % (VOCAB - 1)
    return torch.cat([prompt, answer]), torch.cat([torch.full((3,), IGNORE), answer])


def collate(indices):
    items = [conversation(i) for i in indices]
    ids = nn.utils.rnn.pad_sequence([a for a, _ in items], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([b for _, b in items], batch_first=True, padding_value=IGNORE)
    return ids[:, :-1], labels[:, 1:]


def lr_factor(tokens, budget):
    warm = 0.05 * budget
    if tokens < warm:
        return max(tokens, 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (tokens - warm) / (budget - warm))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--token-budget", type=int, default=2400)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(17)
    model = ChatLM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    step, tokens_seen = 0, 0
    if args.resume:
        newest = sorted(f for f in os.listdir(args.resume) if f.endswith(".pt"))[-1]
        ck = torch.load(os.path.join(args.resume, newest), map_location="cpu")
        o = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, ck["model"], options=o)
        set_optimizer_state_dict(model, opt, ck["optim"], options=o)
        step, tokens_seen = ck["step"], ck["tokens_seen"]

    while step < args.steps:
        first = step * args.batch + rank * (args.batch // world)
        ids, labels = collate(range(first, first + args.batch // world))
        n_local = (labels != IGNORE).sum()
        n_global = n_local.clone()
        dist.all_reduce(n_global)
        tokens_seen += int(n_global)
        for group in opt.param_groups:
            group["lr"] = args.lr * lr_factor(tokens_seen, args.token_budget)

        total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = total * world / n_global      # FSDP averages over the ranks
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1

        shown = total.detach() / n_global
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {shown.item():.4f} tokens {tokens_seen} lr {opt.param_groups[0]['lr']:.2e}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            o = StateDictOptions(full_state_dict=True, cpu_offload=True)
            m, s = get_model_state_dict(model, options=o), get_optimizer_state_dict(model, opt, options=o)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": m, "optim": s, "step": step, "tokens_seen": tokens_seen},
                           os.path.join(args.out, f"sft_{step:05d}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
