"""Pretraining of a small mixture-of-experts language model.

Next to the language model loss the routers have a balancing loss (with global
expert loads) and a z-loss that keeps their logits small.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class MoE(nn.Module):
    def __init__(self, dim, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(num_experts, dim, 2 * dim) * dim**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_experts, 2 * dim, dim) * (2 * dim) ** -0.5)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        router_logits = self.router(tokens)
        weights, experts = router_logits.softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(router_logits).scatter(1, experts, weights)
        hidden = F.silu(torch.einsum("td,edh->teh", tokens, self.w_in))
        out = torch.einsum("teh,ehd,te->td", hidden, self.w_out, gates)
        return out.view_as(x), router_logits


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, num_experts, top_k):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.moe_norm = nn.RMSNorm(dim)
        self.moe = MoE(dim, num_experts, top_k)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.attn_norm(x)).chunk(3, dim=-1)
        )
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attn.transpose(1, 2).reshape(b, t, d))
        out, router_logits = self.moe(self.moe_norm(x))
        return x + out, router_logits


class MoEModel(nn.Module):
    def __init__(self, vocab, dim, heads, layers, num_experts, top_k):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads, num_experts, top_k) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        router_logits = []
        for layer in self.layers:
            x, logits = layer(x)
            router_logits.append(logits)
        return self.lm_head(self.norm(x)), torch.stack(router_logits)


def balancing_loss(router_logits, top_k):
    """router_logits is (layers, tokens, experts); the loads are those of all ranks."""
    num_layers, num_tokens, num_experts = router_logits.shape
    probs = router_logits.float().softmax(-1)
    chosen = probs.topk(top_k, dim=-1).indices
    load = F.one_hot(chosen, num_experts).float().sum(dim=(1, 2))
    dist.all_reduce(load)
    load = load / load.sum(-1, keepdim=True)
    return num_experts * (load * probs.mean(dim=1)).sum()


def z_loss(router_logits):
    router_logits = router_logits.float()
    num_tokens = max(1, router_logits.shape[1])
    logsum_square = torch.logsumexp(router_logits, dim=-1).square()
    return (logsum_square.sum(dim=-1) / num_tokens).sum()


def make_stream(n, length, vocab, seed):
    """Sequences of a random second-order rule with some noise."""
    g = torch.Generator().manual_seed(99)
    table = torch.randint(0, vocab, (vocab, 4), generator=g)
    g.manual_seed(seed)
    out = torch.zeros(n, length, dtype=torch.long)
    out[:, 0] = torch.randint(0, vocab, (n,), generator=g)
    for t in range(1, length):
        pick = torch.multinomial(torch.tensor([0.7, 0.2, 0.07, 0.03]).expand(n, -1), 1, generator=g).squeeze(1)
        out[:, t] = table[out[:, t - 1], pick]
    return out


def mean_over_ranks(*values):
    stacked = torch.stack([v.detach().float() for v in values])
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()


@torch.no_grad()
def evaluate(model, ids, vocab):
    model.eval()
    logits, router_logits = model(ids)
    lm = F.cross_entropy(logits[:, :-1].reshape(-1, vocab), ids[:, 1:].reshape(-1))
    lse = torch.logsumexp(router_logits, dim=-1).abs().mean()
    model.train()
    return mean_over_ranks(lm, lse)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch-size", type=int, default=8, help="sequences of a step over all ranks")
    p.add_argument("--seq-len", type=int, default=24)
    p.add_argument("--vocab", type=int, default=40)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--num-experts", type=int, default=4)
    p.add_argument("--top-k", type=int, default=2)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--balancing-loss-alpha", type=float, default=0.01)
    p.add_argument("--z-loss-alpha", type=float, default=0.01)
    p.add_argument("--seed", type=int, default=3)
    args = p.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    model = MoEModel(args.vocab, args.dim, 2, 2, args.num_experts, args.top_k).to(device)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    data = make_stream(args.batch_size * args.steps, args.seq_len, args.vocab, args.seed)
    held_out = make_stream(32, args.seq_len, args.vocab, args.seed + 1).to(device)
    per_rank = args.batch_size // world_size

    for step in range(args.steps):
        start = step * args.batch_size + rank * per_rank
        ids = data[start : start + per_rank].to(device)

        logits, router_logits = model(ids)
        lm = F.cross_entropy(logits[:, :-1].reshape(-1, args.vocab), ids[:, 1:].reshape(-1))
        balance = balancing_loss(router_logits, args.top_k) * args.balancing_loss_alpha
        z = z_loss(router_logits) * args.z_loss_alpha
        loss = lm + balance + z
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()

        if step % 5 == 0 or step == args.steps - 1:
            total, lm, balance, z = mean_over_ranks(loss, lm, balance, z)
            if rank == 0:
                print(
                    f"step {step} total_loss {total:.6f} llm_loss {lm:.6f} balancing_loss {balance:.6f} "
                    f"z_loss {z:.6f} grad_norm {grad_norm:.5f}",
                    flush=True,
                )

    per_rank = len(held_out) // world_size
    lm, lse = evaluate(model, held_out[rank * per_rank : (rank + 1) * per_rank], args.vocab)
    if rank == 0:
        print(f"held out llm_loss {lm:.6f} router logsumexp {lse:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
