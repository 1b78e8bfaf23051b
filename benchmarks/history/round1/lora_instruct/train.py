"""LoRA instruction tuning of a small grouped-query decoder with FSDP2.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 2 train.py --output /tmp/lora --epochs 2
    torchrun --nproc-per-node 2 train.py --output /tmp/lora --resume

Each epoch leaves a resumable state and the adapter in the layout that the
serving stack reads (half-split rotary order instead of interleaved).
"""

import argparse
import json
import os
from dataclasses import asdict, dataclass
from typing import Optional

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

GLOBAL_BATCH, SEQ, STEPS_PER_EPOCH = 8, 16, 6


@dataclass
class ModelConfig:
    vocab_size: int = 48
    hidden_size: int = 24
    num_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: Optional[int] = 8
    lora_rank: int = 4
    lora_alpha: float = 8.0


def rotary(x):
    """Interleaved rotary embedding, x is (batch, heads, time, head_dim)."""
    t, d = x.shape[-2:]
    freq = 1.0 / 10000 ** (torch.arange(0, d, 2, device=x.device) / d)
    angle = torch.arange(t, device=x.device)[:, None] * freq
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class LoRALinear(nn.Module):
    def __init__(self, fan_in, fan_out, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) / fan_in**0.5, requires_grad=False)
        self.lora_a = nn.Linear(fan_in, cfg.lora_rank, bias=False)
        self.lora_b = nn.Linear(cfg.lora_rank, fan_out, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.scale = cfg.lora_alpha / cfg.lora_rank

    def forward(self, x):
        return F.linear(x, self.weight) + self.scale * self.lora_b(self.lora_a(x))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.norm1 = nn.RMSNorm(cfg.hidden_size)
        self.q_proj = LoRALinear(cfg.hidden_size, self.heads * self.head_dim, cfg)
        self.k_proj = LoRALinear(cfg.hidden_size, self.kv_heads * self.head_dim, cfg)
        self.v_proj = LoRALinear(cfg.hidden_size, self.kv_heads * self.head_dim, cfg)
        self.o_proj = nn.Linear(self.heads * self.head_dim, cfg.hidden_size, bias=False)
        self.norm2 = nn.RMSNorm(cfg.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.hidden_size, 2 * cfg.hidden_size), nn.GELU(), nn.Linear(2 * cfg.hidden_size, cfg.hidden_size)
        )

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm1(x)
        q = rotary(self.q_proj(h).view(b, t, self.heads, self.head_dim).transpose(1, 2))
        k = rotary(self.k_proj(h).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2))
        v = self.v_proj(h).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_layers))
        self.norm = nn.RMSNorm(cfg.hidden_size)
        self.head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def instructions(step, rank, world, vocab):
    """Sequences that repeat their first half."""
    g = torch.Generator().manual_seed(31 * step + 5)
    half = torch.randint(vocab, (GLOBAL_BATCH, SEQ // 2), generator=g)
    rows = torch.cat([half, half], dim=1)
    return rows[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]


def to_serving_layout(adapter, num_heads, num_kv_heads, dim, head_dim=None):
    """Renames the adapter weights and reorders the rotary dimensions of q and k."""
    if head_dim is None:
        head_dim = dim // num_heads

    def permute(t, n_heads):
        rank = t.shape[-1]
        return t.view(n_heads, head_dim // 2, 2, rank).transpose(1, 2).reshape(head_dim * n_heads, rank)

    converted = {}
    for key, value in adapter.items():
        if "q_proj.lora_b" in key:
            value = permute(value, num_heads)
        elif "k_proj.lora_b" in key:
            value = permute(value, num_kv_heads)
        key = key.replace("lora_a", "lora_A").replace("lora_b", "lora_B")
        converted["base_model.model.model." + key] = value.contiguous()
    return converted


def write_adapter(model, cfg, path):
    adapter = {n: p.full_tensor().cpu() for n, p in model.named_parameters() if p.requires_grad}
    if dist.get_rank() == 0:
        weights = to_serving_layout(
            adapter,
            num_heads=cfg.num_attention_heads,
            num_kv_heads=cfg.num_key_value_heads,
            dim=cfg.hidden_size,
            head_dim=cfg.head_dim,
        )
        os.makedirs(path, exist_ok=True)
        torch.save(weights, os.path.join(path, "adapter_model.bin"))
        with open(os.path.join(path, "adapter_config.json"), "w") as f:
            json.dump({"r": cfg.lora_rank, "lora_alpha": cfg.lora_alpha, "base": asdict(cfg)}, f)
    dist.barrier()


def run_state(model, optimizer, epoch):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    return {"model": model_sd, "optimizer": optim_sd, "epoch": epoch}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--output", default=None)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    cfg = ModelConfig()
    torch.manual_seed(3)
    model = Decoder(cfg)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    model.to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)

    first_epoch = 0
    if args.resume:
        state = run_state(model, optimizer, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.output, "state"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first_epoch = state["epoch"]

    for epoch in range(first_epoch, args.epochs):
        for i in range(STEPS_PER_EPOCH):
            step = epoch * STEPS_PER_EPOCH + i
            ids = instructions(step, rank, world, cfg.vocab_size).to(device)
            logits = model(ids)[:, SEQ // 2 - 1 : -1]
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, SEQ // 2 :].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"epoch {epoch} step {step + 1} loss {shown.item() / world:.6f}", flush=True)
        if args.output:
            dcp.save(run_state(model, optimizer, epoch + 1), checkpoint_id=os.path.join(args.output, "state"))
            write_adapter(model, cfg, os.path.join(args.output, f"adapter_{epoch + 1}"))

    norm = sum(p.full_tensor().square().sum() for p in model.parameters() if p.requires_grad).sqrt()
    if rank == 0:
        print(f"finished, adapter norm {norm.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
