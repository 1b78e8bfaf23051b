"""Low-rank adapters on a frozen llama-like decoder; only the adapters are trained, and merged into the exported weights."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

SEQ, GLOBAL_BATCH, SAMPLES, STEPS = 16, 16, 512, 20


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


@dataclass
class Config:
    vocab: int = 48
    width: int = 32
    heads: int = 4
    layers: int = 2
    hidden: int = 64


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.wq = nn.Linear(cfg.width, cfg.width, bias=False)
        self.wk = nn.Linear(cfg.width, cfg.width, bias=False)
        self.wv = nn.Linear(cfg.width, cfg.width, bias=False)
        self.wo = nn.Linear(cfg.width, cfg.width, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.width, cfg.hidden, bias=False)
        self.up = nn.Linear(cfg.width, cfg.hidden, bias=False)
        self.down = nn.Linear(cfg.hidden, cfg.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_norm = nn.RMSNorm(cfg.width)
        self.attention = Attention(cfg)
        self.post_norm = nn.RMSNorm(cfg.width)
        self.mlp = SwiGLU(cfg)

    def forward(self, x):
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.width)
        self.layers = nn.ModuleList([DecoderLayer(cfg) for _ in range(cfg.layers)])
        self.norm = nn.RMSNorm(cfg.width)
        self.lm_head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build_dataset(num_samples, vocab, length, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.empty(num_samples, length + 1, dtype=torch.long)
    x[:, 0] = torch.randint(vocab, (num_samples,), generator=g)
    jump = torch.randint(0, 2, (num_samples, length), generator=g)
    for t in range(length):
        x[:, t + 1] = (x[:, t] * 7 + 1 + jump[:, t]) % vocab
    return x


def add_adapters(model):
    model.requires_grad_(False)
    for layer in model.layers:
        layer.attention.wq = LoRALinear(layer.attention.wq)
        layer.attention.wv = LoRALinear(layer.attention.wv)
        layer.mlp.up = LoRALinear(layer.mlp.up)
        layer.mlp.down = LoRALinear(layer.mlp.down)
    model.lm_head = LoRALinear(model.lm_head, rank=8)
    return model


def merged(model):
    """The weights under the names of the plain decoder, on rank 0; {} on the others."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for path, layer in model.named_modules():
        if full and isinstance(layer, LoRALinear):
            up, down = full.pop(f"{path}.up.weight"), full.pop(f"{path}.down.weight")
            full[f"{path}.weight"] = full.pop(f"{path}.base.weight") + layer.scale * (up @ down)
    return full


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(42)
    cfg = Config()
    model = add_adapters(Decoder(cfg))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-2, weight_decay=0.0)

    data = build_dataset(SAMPLES, cfg.vocab, SEQ, seed=1)
    per_rank = GLOBAL_BATCH // world
    for step in range(STEPS):
        offset = (step * GLOBAL_BATCH) % SAMPLES + rank * per_rank
        batch = data[offset : offset + per_rank]
        loss = F.cross_entropy(model(batch[:, :-1]).reshape(-1, cfg.vocab), batch[:, 1:].reshape(-1))
        loss.backward()
        clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1:3d} loss {loss.item():.4f}", flush=True)
    export = merged(model)
    if rank == 0:
        torch.save(export, "merged.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
