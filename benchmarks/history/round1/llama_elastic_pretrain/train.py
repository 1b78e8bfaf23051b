"""Pretraining loop with sharded checkpoints that can be continued on another number of ranks.

    torchrun --nproc-per-node 2 train.py --checkpoint-interval 6 --checkpoints-path DIR
    torchrun --nproc-per-node 4 train.py --resume --checkpoints-path DIR
"""
import argparse
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, HIDDEN, HEADS, LAYERS, SEQ = 64, 32, 2, 2, 24


@dataclass
class TrainingMetadata:
    last_train_step: int = 0
    consumed_train_samples: int = 0


class LlamaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)
        self.up_proj = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv_proj(self.input_layernorm(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attn.transpose(1, 2).reshape(b, t, HIDDEN))
        return x + self.down_proj(F.silu(self.up_proj(self.post_attention_layernorm(x))))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, HIDDEN)
        self.position_embedding = nn.Embedding(SEQ, HIDDEN)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        self.final_layernorm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.token_embedding(input_ids)
        x = x + self.position_embedding(torch.arange(input_ids.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_layernorm(x))


class ModelWithLoss(nn.Module):
    """Adds the language modelling loss to a network."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens):
        logits = self.module(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def save_weights(model, root):
    dcp.save(get_model_state_dict(model), checkpoint_id=str(root / "model"))


def load_weights(model, root):
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=str(root / "model"))
    set_model_state_dict(model, state)


def save_optimizer(optimizer, model, root):
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=str(root / "optimizer"))


def load_optimizer(optimizer, model, root):
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=str(root / "optimizer"))
    set_optimizer_state_dict(model, optimizer, state)


class TokenDataset:
    """Arithmetic sequences modulo the vocabulary with a bit of noise, addressed by sample number."""

    def get(self, index):
        g = torch.Generator().manual_seed(index + 1)
        start, stride = torch.randint(0, VOCAB, (2,), generator=g).tolist()
        tokens = (start + (stride % 7 + 1) * torch.arange(SEQ + 1)) % VOCAB
        noise = torch.rand(SEQ + 1, generator=g) < 0.05
        return torch.where(noise, torch.randint(0, VOCAB, (SEQ + 1,), generator=g), tokens)

    def batch(self, indices):
        return torch.stack([self.get(i) for i in indices])


class Trainer:
    def __init__(self, args):
        self.args = args
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.checkpoints_path = Path(args.checkpoints_path) if args.checkpoints_path else None
        self.init_checkpoint_path = self.parse_checkpoint_path() if args.resume else None

        torch.manual_seed(args.seed)
        self.model = self.init_model()
        self.unwrapped_model = self.model.module

        self.optimizer = torch.optim.AdamW(
            self.unwrapped_model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01
        )
        if self.init_checkpoint_path is not None:
            load_weights(self.unwrapped_model, self.init_checkpoint_path)
            load_optimizer(
                optimizer=self.optimizer,
                model=self.unwrapped_model,
                root=self.init_checkpoint_path,
            )

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_lambda)
        if self.init_checkpoint_path is not None:
            state = torch.load(self.init_checkpoint_path / "lr_scheduler.pt")
            self.lr_scheduler.load_state_dict(state)
            for group, lr in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr()):
                group["lr"] = lr

        self.metadata = TrainingMetadata()
        if self.init_checkpoint_path is not None:
            self.metadata = TrainingMetadata(**json.loads((self.init_checkpoint_path / "metadata.json").read_text()))
            self.log(f"continuing {self.init_checkpoint_path.name}: {self.metadata}")
        self.dataset = TokenDataset()

    def log(self, message):
        if self.rank == 0:
            print(message, flush=True)

    def lr_lambda(self, step):
        warmup = 4
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / self.args.train_steps))

    def init_model(self):
        net = Llama().to(self.device)
        mesh = init_device_mesh(self.device.type, (self.world,))
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return ModelWithLoss(net)

    def parse_checkpoint_path(self):
        step = int((self.checkpoints_path / "latest.txt").read_text())
        return self.checkpoints_path / str(step)

    def save_checkpoint(self):
        root = self.checkpoints_path / str(self.metadata.last_train_step)
        save_weights(self.unwrapped_model, root)
        save_optimizer(self.optimizer, self.unwrapped_model, root)
        if self.rank == 0:
            torch.save(self.lr_scheduler.state_dict(), root / "lr_scheduler.pt")
            (root / "metadata.json").write_text(json.dumps(asdict(self.metadata)))
            (self.checkpoints_path / "latest.txt").write_text(str(self.metadata.last_train_step))
        dist.barrier()
        self.log(f"saved checkpoint {root.name}")

    def training_step(self):
        first = self.metadata.consumed_train_samples
        per_rank = self.args.global_batch_size // self.world
        indices = range(first + self.rank * per_rank, first + (self.rank + 1) * per_rank)
        loss = self.model(self.dataset.batch(indices).to(self.device))
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.unwrapped_model.parameters(), 1.0).full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        loss_avg = loss.detach().clone()
        dist.all_reduce(loss_avg)
        return loss_avg.item() / self.world, grad_norm.item()

    def train(self):
        self.model.train()
        for step in range(self.metadata.last_train_step + 1, self.args.train_steps + 1):
            lr = self.lr_scheduler.get_last_lr()[0]
            loss, grad_norm = self.training_step()
            self.metadata.last_train_step = step
            self.metadata.consumed_train_samples += self.args.global_batch_size
            self.log(f"iteration {step} / {self.args.train_steps} | lr {lr:.3e} | loss {loss:.6f} | gnorm {grad_norm:.4f}")
            if self.args.checkpoint_interval and step % self.args.checkpoint_interval == 0:
                self.save_checkpoint()
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-steps", type=int, default=24)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpoint-interval", type=int, default=0)
    parser.add_argument("--checkpoints-path", default=None)
    parser.add_argument("--resume", action="store_true")
    Trainer(parser.parse_args()).train()
