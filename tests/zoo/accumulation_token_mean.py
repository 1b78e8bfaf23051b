"""Accumulation with uneven label masks: one token count for all micro-batches of all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEQ, VOCAB, GLOBAL_BATCH, SAMPLES, STEPS, ACCUMULATION = 16, 48, 16, 512, 20, 2


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


def make_examples(samples):
    """Prompt and answer in one sequence; only the answer is trained on, and its length differs a lot."""
    gen = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        bit = torch.randint(0, 2, (samples,), generator=gen)
        tokens.append((5 * tokens[-1] + 3 + bit) % VOCAB)
    tokens = torch.stack(tokens, dim=1)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    answer = 1 + (torch.rand(samples, generator=gen) ** 3 * (SEQ - 1)).long()
    labels[torch.arange(SEQ) < SEQ - answer[:, None]] = -100
    return inputs, labels


class FineTuner:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        torch.manual_seed(42)
        self.model = Decoder(Config(vocab=VOCAB))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.inputs, self.labels = make_examples(SAMPLES)

    def micro_batches(self, step):
        size = GLOBAL_BATCH // (self.world * ACCUMULATION)
        first = step * GLOBAL_BATCH % SAMPLES + self.rank * size * ACCUMULATION
        for start in range(first, first + size * ACCUMULATION, size):
            yield self.inputs[start : start + size], self.labels[start : start + size]

    def step(self, step):
        batches = list(self.micro_batches(step))
        count = sum((labels != -100).sum() for _, labels in batches)
        dist.all_reduce(count)
        total = torch.zeros(())
        for index, (inputs, labels) in enumerate(batches):
            self.model.set_requires_gradient_sync(index == ACCUMULATION - 1)
            loss_sum = self.criterion(self.model(inputs).view(-1, VOCAB), labels.reshape(-1))
            (loss_sum * self.world / count).backward()
            total += loss_sum.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return (total / count).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    tuner = FineTuner()
    for number in range(STEPS):
        value = tuner.step(number)
        if tuner.rank == 0:
            print(f"step {number + 1} loss {value:.4f}", flush=True)
    dist.destroy_process_group()
