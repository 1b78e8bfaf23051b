"""Small decoder pretraining; every micro-batch's gradient is clipped before it joins the step's gradient."""
import argparse
import math
import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = RMSNorm(dim // heads), RMSNorm(dim // heads)
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        x = x + self.wo(a.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocab, dim, heads, depth, seq_len, tie):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.positions.weight, std=0.1)
        nn.init.normal_(self.tok_embeddings.weight, std=dim**-0.5)
        if tie:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        h = self.tok_embeddings(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class Corpus:
    """Sentences of a random grammar: a topic decides the successor of each word, 5% are replaced."""

    def __init__(self, vocab, seq_len, seed):
        g = torch.Generator().manual_seed(seed)
        self.tables = torch.stack([torch.randperm(vocab, generator=g) for _ in range(3)])
        self.vocab, self.seq_len, self.seed = vocab, seq_len, seed

    def batch(self, index, size):
        g = torch.Generator().manual_seed(self.seed + 1 + 31 * index)
        topic = torch.randint(len(self.tables), (size,), generator=g)
        words = [torch.randint(self.vocab, (size,), generator=g)]
        for _ in range(self.seq_len):
            words.append(self.tables[topic, words[-1]])
        ids = torch.stack(words, 1)
        noise = torch.rand(ids.shape, generator=g) < 0.05
        return torch.where(noise, torch.randint(self.vocab, ids.shape, generator=g), ids)


class Trainer:
    def __init__(self, args):
        self.args = args
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

        torch.manual_seed(args.seed)
        self.model = Decoder(args.vocab, args.dim, args.heads, args.depth, args.seq_len, not args.untie).to(self.device)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        # by name, as the logs and the release's weight files list them
        self.named_params = list(self.model.named_parameters(remove_duplicate=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        self.corpus = Corpus(args.vocab, args.seq_len, args.seed)
        self.step = 0

    def lr_at(self, step):
        warm = min(1.0, (step + 1) / self.args.warmup)
        return self.args.lr * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / self.args.steps)))

    def loss(self, ids):
        logits = self.model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def forward_backward(self, ids):
        """Loss and the clipped gradient of one micro-batch, one entry a name."""
        loss = self.loss(ids)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.micro_clip).full_tensor()
        grads = [p.grad for _, p in self.named_params]
        for p in self.model.parameters():
            p.grad = None
        return loss.detach(), norm, grads

    def write_back(self, grads, scale):
        """Add a micro-batch's gradient to the step's."""
        written = set()
        for (_, p), grad in zip(self.named_params, grads):
            if p in written:
                continue
            written.add(p)
            if p in self.step_grads:
                self.step_grads[p] = self.step_grads[p] + grad * scale
            else:
                self.step_grads[p] = grad * scale

    def train_step(self):
        args = self.args
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(self.step)
        ids = self.corpus.batch(self.step, args.batch).chunk(args.micro_batches)
        self.step_grads, total, norms = {}, torch.zeros((), device=self.device), []
        for micro in ids:
            loss, norm, grads = self.forward_backward(micro.chunk(self.world)[self.rank].to(self.device))
            self.write_back(grads, 1.0 / args.micro_batches)
            total += loss / args.micro_batches
            norms.append(norm.item())
        for p, grad in self.step_grads.items():
            p.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return self.mean(total), max(norms)

    def weight_norms(self):
        groups = defaultdict(float)
        for name, p in self.model.named_parameters():
            key = "layers" if name.startswith("layers") else name.split(".")[0]
            groups[key] += p.detach().full_tensor().double().square().sum().item()
        return "  ".join(f"{k} {v ** 0.5:.6f}" for k, v in groups.items())

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        losses = [
            self.mean(self.loss(self.corpus.batch(50_000 + i, self.args.batch).chunk(self.world)[self.rank].to(self.device)))
            for i in range(4)
        ]
        return sum(losses) / len(losses)

    def train(self):
        while self.step < self.args.steps:
            loss, norm = self.train_step()
            if self.rank == 0 and (self.step == 1 or self.step % self.args.log_every == 0):
                print(f"step {self.step:3d}  loss {loss:.6f}  largest micro grad norm {norm:.4f}", flush=True)
        norms, val = self.weight_norms(), self.validate()
        if self.rank == 0:
            print(f"validation loss {val:.6f}  weight norms: {norms}", flush=True)
        dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=32, help="sequences of a step over all ranks")
    p.add_argument("--micro-batches", type=int, default=2)
    p.add_argument("--micro-clip", type=float, default=1.0)
    p.add_argument("--vocab", type=int, default=32)
    p.add_argument("--seq-len", type=int, default=16)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--heads", type=int, default=2)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--untie", action="store_true")
    p.add_argument("--lr", type=float, default=0.3)
    p.add_argument("--warmup", type=int, default=4)
    p.add_argument("--log-every", type=int, default=4)
    p.add_argument("--seed", type=int, default=8)
    Trainer(p.parse_args()).train()


if __name__ == "__main__":
    main()
