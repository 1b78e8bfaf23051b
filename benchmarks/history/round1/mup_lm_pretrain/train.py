"""Pretrain a small LLaMA-like model with spectral muTransfer parametrization on FSDP2.

The optimizer runs on the local shards, with one parameter group for each tensor
so that its learning rate can follow the shape of the layer it belongs to.
"""
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass
class ModelConfig:
    vocab_size: int = 96
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 3
    num_heads: int = 2
    max_position: int = 32


@dataclass
class OptimizerConfig:
    learning_rate: float = 0.01
    weight_decay: float = 0.1
    betas: tuple = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0
    warmup_steps: int = 5
    min_lr_ratio: float = 0.1


@dataclass
class TrainConfig:
    seed: int = 42
    train_steps: int = 40
    global_batch_size: int = 16
    sequence_length: int = 32
    log_interval: int = 5


def get_logger(rank):
    return print if rank == 0 else (lambda *a, **k: None)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.num_heads
        self.qkv_proj = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size, bias=False)
        self.o_proj = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv_proj(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # muTransfer scales the scores by 1/d_head rather than 1/sqrt(d_head)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / q.shape[-1])
        return self.o_proj(out.transpose(1, 2).reshape(b, t, d))


class DecoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_norm = RMSNorm(cfg.hidden_size)
        self.attn = Attention(cfg)
        self.post_norm = RMSNorm(cfg.hidden_size)
        self.gate_up_proj = nn.Linear(cfg.hidden_size, 2 * cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        x = x + self.attn(self.input_norm(x))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class LlamaForTraining(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.embed_pos = nn.Embedding(cfg.max_position, cfg.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def forward(self, input_ids):
        pos = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed_tokens(input_ids) + self.embed_pos(pos)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def init_spectral(self, std=1.0):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                fan_out, fan_in = module.weight.shape
                spectral_std = std / math.sqrt(fan_in) * min(1.0, math.sqrt(fan_out / fan_in))
                nn.init.normal_(module.weight, std=spectral_std)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)


class SpectralMupLearningRate:
    """Learning rate of a tensor: lr * fan_out / fan_in for matrices, lr for all the rest."""

    def __init__(self, model, cfg):
        self.names_to_modules = {
            f"{prefix}.{name}": module
            for prefix, module in model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        self.cfg = cfg

    def get_lr(self, name, param):
        if isinstance(self.names_to_modules[name], nn.Linear):
            fan_out, fan_in = param.shape
            return self.cfg.learning_rate * fan_out / fan_in
        return self.cfg.learning_rate


class ShardedOptimizer:
    """AdamW on the local shard of each parameter. A rank skips tensors of which it holds nothing."""

    def __init__(self, named_params, cfg, lr_mapper):
        self.named_params = [(name, p) for name, p in named_params if p.requires_grad]
        self.shards = {}
        param_groups = []
        for name, param in self.named_params:
            shard = param.detach().to_local()
            if shard.numel() == 0:
                continue
            self.shards[name] = shard
            decay = cfg.weight_decay if param.ndim > 1 else 0.0
            param_groups.append(
                {"params": [shard], "name": name, "lr": lr_mapper.get_lr(name, param), "weight_decay": decay}
            )
        self.optimizer = torch.optim.AdamW(param_groups, lr=cfg.learning_rate, betas=cfg.betas, eps=cfg.eps)

    @torch.no_grad()
    def step(self):
        for name, param in self.named_params:
            if name in self.shards and param.grad is not None:
                self.shards[name].grad = param.grad.to_local()
        self.optimizer.step()

    def zero_grad(self):
        for name, param in self.named_params:
            param.grad = None
            if name in self.shards:
                self.shards[name].grad = None


def lr_lambda(cfg, total_steps):
    def fn(step):
        if step < cfg.warmup_steps:
            return (step + 1) / cfg.warmup_steps
        progress = (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * cosine

    return fn


def make_stream(cfg, vocab, num, seed):
    """A Markov chain with a few likely successors for each token."""
    g = torch.Generator().manual_seed(seed)
    successors = torch.randint(0, vocab, (vocab, 4), generator=torch.Generator().manual_seed(1234))
    tokens = torch.randint(0, vocab, (num, 1), generator=g)
    columns = [tokens[:, 0]]
    for _ in range(cfg.sequence_length):
        pick = torch.randint(0, 4, (num,), generator=g)
        columns.append(successors[columns[-1], pick])
    return torch.stack(columns, dim=1)


def lm_loss(model, batch):
    logits = model(batch[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model, data, rank, world, device):
    losses = [lm_loss(model, chunk.chunk(world)[rank].to(device)) for chunk in data.split(16)]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / world


def main():
    model_cfg, optim_cfg, cfg = ModelConfig(), OptimizerConfig(), TrainConfig()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    log = get_logger(rank)

    torch.manual_seed(cfg.seed)
    model = LlamaForTraining(model_cfg)
    model.init_spectral()
    model.to(device)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    optimizer = ShardedOptimizer(model.named_parameters(), optim_cfg, SpectralMupLearningRate(model, optim_cfg))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lr_lambda(optim_cfg, cfg.train_steps))
    log(f"{len(optimizer.optimizer.param_groups)} parameter groups with custom learning rate")

    train = make_stream(cfg, model_cfg.vocab_size, cfg.train_steps * cfg.global_batch_size, seed=1)
    valid = make_stream(cfg, model_cfg.vocab_size, 64, seed=2)

    for step, batch in enumerate(train.split(cfg.global_batch_size), start=1):
        loss = lm_loss(model, batch.chunk(world)[rank].to(device))
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), optim_cfg.clip_grad).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if step == 1 or step % cfg.log_interval == 0:
            log(f"iteration {step:3d} | lm_loss {mean.item() / world:.6f} | grad_norm {grad_norm.item():.5f}")
    log(f"validation | lm_loss {validate(model, valid, rank, world, device):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
