"""A trainer with DCP checkpoints; weights are read into a separate copy first.

rule: load-without-set
save_args: --save-every 3 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEQ, GLOBAL_BATCH, SAMPLES, STEPS = 16, 16, 512, 20


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


def latest_checkpoint(folder):
    complete = [p.parent for p in Path(folder).glob("step_*/.metadata")]
    if not complete:
        raise SystemExit(f"no checkpoint in {folder}")
    return max(complete, key=lambda p: p.name)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        torch.manual_seed(42)
        self.cfg = Config()
        self.model = Decoder(self.cfg)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        self.data = build_dataset(SAMPLES, self.cfg.vocab, SEQ, seed=1)
        self.step = 0

    def save(self):
        state = {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "step": self.step,
        }
        dcp.save(state, checkpoint_id=Path(self.args.out) / f"step_{self.step:06d}")

    def load(self, folder):
        weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        state = {
            "model": weights,
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "step": 0,
        }
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.step = state["step"]
        if self.rank == 0:
            print(f"loaded {len(weights)} tensors from {folder}, continuing at step {self.step}", flush=True)

    def train_step(self):
        per_rank = GLOBAL_BATCH // self.world
        offset = (self.step * GLOBAL_BATCH) % SAMPLES + self.rank * per_rank
        batch = self.data[offset : offset + per_rank]
        loss = F.cross_entropy(self.model(batch[:, :-1]).reshape(-1, self.cfg.vocab), batch[:, 1:].reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def run(self):
        if self.args.resume:
            self.load(latest_checkpoint(self.args.resume))
        while self.step < self.args.steps:
            loss = self.train_step()
            if self.rank == 0:
                print(f"step {self.step:3d} loss {loss:.4f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default=None, help="folder with step_* checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(parse_args()).run()
    dist.destroy_process_group()
