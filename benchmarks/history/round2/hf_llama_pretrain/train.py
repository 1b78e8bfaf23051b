"""Pretrain a small Llama-style decoder, initialised on the meta device and sharded with FSDP2.

The model never exists unsharded on any rank: it is built on `meta`, sharded, materialised
with `to_empty`, and then every module is initialised in place.
"""
import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

log = logging.getLogger("pretrain")


class Config:
    vocab_size = 64
    hidden_size = 32
    intermediate_size = 64
    num_hidden_layers = 3
    num_attention_heads = 4
    max_seq_len = 32
    rms_norm_eps = 1e-5
    initializer_range = 0.05


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        var = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(var + self.eps)).type_as(x)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d = cfg.hidden_size
        self.n_head = cfg.num_attention_heads
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = (proj(x).view(b, t, self.n_head, -1).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))


class LlamaMLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = LlamaAttention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = LlamaMLP(cfg)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def forward(self, tokens):
        head_dim = self.cfg.hidden_size // self.cfg.num_attention_heads
        freqs = 10000.0 ** (-torch.arange(0, head_dim, 2, device=tokens.device) / head_dim)
        angles = torch.outer(torch.arange(tokens.size(1), device=tokens.device), freqs).repeat(1, 2)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def init_weights(self, module, generator):
        std = self.cfg.initializer_range
        if isinstance(module, nn.Linear):
            fill(module.weight, lambda t: t.normal_(0.0, std, generator=generator))
            if module.bias is not None:
                fill(module.bias, torch.Tensor.zero_)
        elif isinstance(module, nn.Embedding):
            fill(module.weight, lambda t: t.normal_(0.0, std, generator=generator))
        elif isinstance(module, (nn.LayerNorm, RMSNorm)):
            fill(module.weight, lambda t: t.fill_(1.0))


def fill(param, init_fn):
    """Initialise the full tensor (the same on every rank) and keep the local shard."""
    full = init_fn(torch.empty(param.shape, dtype=param.dtype))
    if isinstance(param, DTensor):
        full = distribute_tensor(full.to(param.device), param.device_mesh, param.placements)
    param.copy_(full)


def build_model(cfg, mesh, device, seed):
    with torch.device("meta"):
        model = LlamaForCausalLM(cfg)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)

    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        model.init_weights(module, generator)
    return model


class SyntheticText:
    """Sequences from a fixed second-order Markov chain over the vocabulary."""

    def __init__(self, cfg, seed):
        g = torch.Generator().manual_seed(seed)
        self.cfg, self.seed = cfg, seed
        self.table = torch.randint(0, cfg.vocab_size, (cfg.vocab_size, 4), generator=g)

    def sample(self, index):
        g = torch.Generator().manual_seed(self.seed * 100_003 + index)
        tokens = [int(torch.randint(0, self.cfg.vocab_size, (1,), generator=g))]
        choices = torch.randint(0, 4, (self.cfg.max_seq_len,), generator=g)
        for c in choices.tolist():
            tokens.append(int(self.table[tokens[-1], c]))
        return torch.tensor(tokens)

    def batch(self, start, count, rank, world):
        return torch.stack([self.sample(i) for i in range(start + rank, start + count, world)])


def lm_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-duration", type=int, default=40, help="in batches")
    parser.add_argument("--global-train-batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--t-warmup", type=int, default=4)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    cfg = Config()
    model = build_model(cfg, mesh, device, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda ba: min(1.0, (ba + 1) / args.t_warmup))
    train_data, eval_data = SyntheticText(cfg, seed=1), SyntheticText(cfg, seed=1)

    for ba in range(args.max_duration):
        start = ba * args.global_train_batch_size
        tokens = train_data.batch(start, args.global_train_batch_size, rank, world).to(device)
        loss = lm_loss(model, tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if ba % 5 == 0 or ba + 1 == args.max_duration:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            norm = norm.full_tensor().item()
            if rank == 0:
                log.info("ba %3d  loss/train %.6f  grad_norm %.5f", ba, mean.item() / world, norm)

    with torch.no_grad():
        total = lm_loss(model, eval_data.batch(1_000_000, 32, rank, world).to(device))
    dist.all_reduce(total)
    if rank == 0:
        log.info("loss/eval %.6f", total.item() / world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
