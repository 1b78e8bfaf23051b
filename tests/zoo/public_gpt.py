"""
Pretrain a small GPT on a token stream with FSDP2. One process or many:

    python gpt_pretrain.py --max_iters 5
    torchrun --standalone --nproc-per-node 4 gpt_pretrain.py --max_iters 5 --out_dir out --ckpt_interval 3
    torchrun --standalone --nproc-per-node 4 gpt_pretrain.py --max_iters 5 --out_dir out --resume

The number of micro batches per iteration is a global number: it is divided over the ranks.

args: --max_iters 5
save_args: --ckpt_interval 3 --out_dir {checkpoint}
resume_args: --resume --out_dir {checkpoint}
"""

import argparse
import dataclasses
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass
class Config:
    # model
    vocab_size: int = 128
    block_size: int = 32
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 64
    bias: bool = False
    # optimisation
    max_iters: int = 5
    batch_size: int = 4  # sequences in one micro batch
    gradient_accumulation_steps: int = 8  # micro batches in one iteration, over all ranks
    learning_rate: float = 3e-3
    min_lr: float = 3e-4
    warmup_iters: int = 2
    lr_decay_iters: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    # system
    seed: int = 1337
    dtype: str = "float32"
    eval_interval: int = 2
    eval_iters: int = 4
    ckpt_interval: int = 0
    out_dir: str = "out"
    resume: bool = False


def parse_args() -> Config:
    parser = argparse.ArgumentParser()
    for f in dataclasses.fields(Config):
        if f.type in (bool, "bool"):
            parser.add_argument(f"--{f.name}", action="store_true", default=f.default)
        else:
            parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
    return Config(**vars(parser.parse_args()))


# --------------------------------------------------------------------------- model
def rope_table(length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
    angle = torch.outer(torch.arange(length).float(), freq)
    return angle.cos(), angle.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.n_head = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd), CausalSelfAttention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd), MLP(c)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.ln_1(x), cos, sin)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # weight tying
        cos, sin = rope_table(c.block_size, c.n_embd // c.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * c.n_layer))

    @staticmethod
    def _init_weights(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, mean=0.0, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1))


# --------------------------------------------------------------------------- data
def make_tokens(c: Config, length: int, seed: int) -> torch.Tensor:
    """A noisy order-1 Markov chain: something that a model can learn."""
    g = torch.Generator().manual_seed(seed)
    table = torch.randperm(c.vocab_size, generator=torch.Generator().manual_seed(7))
    noise = torch.rand(length, generator=g) < 0.15
    rand = torch.randint(c.vocab_size, (length,), generator=g)
    out = torch.empty(length, dtype=torch.long)
    tok = 0
    for i in range(length):
        tok = int(rand[i]) if noise[i] else int(table[tok])
        out[i] = tok
    return out


def get_batch(data: torch.Tensor, c: Config, it: int, micro: int, split: int):
    """The batch is a function of (iteration, global micro batch): any rank can make any of them, a resume needs no state."""
    g = torch.Generator().manual_seed(c.seed * 1_000_003 + split * 500_009 + it * 1009 + micro)
    ix = torch.randint(len(data) - c.block_size - 1, (c.batch_size,), generator=g)
    x = torch.stack([data[i : i + c.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + c.block_size] for i in ix])
    return x, y


# --------------------------------------------------------------------------- training
def get_lr(it: int, c: Config) -> float:
    if it < c.warmup_iters:
        return c.learning_rate * (it + 1) / (c.warmup_iters + 1)
    if it > c.lr_decay_iters:
        return c.min_lr
    ratio = (it - c.warmup_iters) / (c.lr_decay_iters - c.warmup_iters)
    return c.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (c.learning_rate - c.min_lr)


def configure_optimizer(model: nn.Module, c: Config) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": c.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2))


class TrainState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.iter_num, self.best_val = 0, float("inf")

    def state_dict(self):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        return {"model": model_sd, "optim": optim_sd, "iter_num": self.iter_num, "best_val": self.best_val}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.optimizer, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.iter_num, self.best_val = sd["iter_num"], sd["best_val"]


@torch.no_grad()
def estimate_loss(model, data, c: Config, rank: int, world: int) -> float:
    model.eval()
    total = torch.zeros(1)
    for k in range(rank, c.eval_iters, world):
        total += model(*get_batch(data, c, 0, k, split=1))
    dist.all_reduce(total)
    model.train()
    return (total / c.eval_iters).item()


def main():
    c = parse_args()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29561")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = print if rank == 0 else (lambda *a, **k: None)
    assert c.gradient_accumulation_steps % world == 0 and c.eval_iters % world == 0
    local_accum = c.gradient_accumulation_steps // world

    torch.manual_seed(c.seed)
    model = GPT(c)
    log(
        f"{sum(p.numel() for p in model.parameters()) / 1e3:.0f}K parameters, {world} ranks, {local_accum} micro batches a rank"
    )

    mesh = init_device_mesh("cpu", (world,))
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if c.dtype == "bfloat16" else None, reduce_dtype=torch.float32)
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    optimizer = configure_optimizer(model, c)

    state = TrainState(model, optimizer)
    ckpt_dir = Path(c.out_dir) / "ckpt"
    if c.resume:
        dcp.load({"app": state}, checkpoint_id=str(ckpt_dir))
        log(f"resumed at iteration {state.iter_num}")

    train_data, val_data = make_tokens(c, 20_000, seed=1), make_tokens(c, 2_000, seed=2)
    while state.iter_num < c.max_iters:
        it, t0 = state.iter_num, time.time()
        lr = get_lr(it, c)
        for group in optimizer.param_groups:
            group["lr"] = lr

        loss_sum = torch.zeros(1)
        for k in range(local_accum):
            model.set_requires_gradient_sync(k == local_accum - 1)
            x, y = get_batch(train_data, c, it, rank * local_accum + k, split=0)
            loss = model(x, y) / local_accum
            loss.backward()
            loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip).full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        dist.all_reduce(loss_sum)
        state.iter_num += 1
        log(
            f"iter {state.iter_num}: loss {loss_sum.item() / world:.6f} norm {norm.item():.5f} lr {lr:.2e} {1e3 * (time.time() - t0):.0f}ms"
        )
        if state.iter_num % c.eval_interval == 0:
            val = estimate_loss(model, val_data, c, rank, world)
            state.best_val = min(state.best_val, val)
            log(f"iter {state.iter_num}: val {val:.6f} best {state.best_val:.6f}")
        if c.ckpt_interval and state.iter_num % c.ckpt_interval == 0:
            dcp.save({"app": state}, checkpoint_id=str(ckpt_dir))
            log(f"saved {ckpt_dir}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
