"""A trainer class around a llama-like decoder: clipping, schedule, logging of the mean loss."""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

SEQ, SAMPLES, SEED = 16, 512, 42


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


class Trainer:
    def __init__(self, args):
        self.args = args
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        torch.manual_seed(SEED)
        self.cfg = Config()
        self.model = self.shard(Decoder(self.cfg))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=args.steps)
        self.data = build_dataset(SAMPLES, self.cfg.vocab, SEQ, seed=1)

    def shard(self, model):
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    def batch(self, step):
        local = self.args.global_batch // self.world
        first = (step * self.args.global_batch) % SAMPLES + self.rank * local
        tokens = self.data[first : first + local]
        return tokens[:, :-1], tokens[:, 1:]

    def train_step(self, step):
        inputs, targets = self.batch(step)
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, self.cfg.vocab), targets.reshape(-1))
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), self.args.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm.full_tensor()

    def run(self):
        for step in range(self.args.steps):
            loss, norm = self.train_step(step)
            dist.all_reduce(loss)
            if self.rank == 0:
                print(f"step {step + 1:3d} loss {loss.item() / self.world:.4f} grad norm {norm.item():.3f}", flush=True)
        dist.destroy_process_group()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--max-norm", type=float, default=0.5)
    return parser.parse_args()


if __name__ == "__main__":
    Trainer(parse_args()).run()
