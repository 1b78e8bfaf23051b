#!/usr/bin/env python
"""Finetuning recipe for next token prediction with periodic validation."""

import json
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
logger = logging.getLogger("finetune")

IGNORE_INDEX = -100


@dataclass
class Config:
    seed: int = 1111
    vocab: int = 36
    max_len: int = 20
    dim: int = 24
    heads: int = 3
    layers: int = 2
    lr: float = 5e-3
    weight_decay: float = 0.01
    local_batch_divisor: int = 8
    grad_acc_steps: int = 2
    max_steps: int = 32
    val_every_steps: int = 8
    val_samples: int = 64
    clip: float = 1.0


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.input_norm = nn.RMSNorm(cfg.dim)
        self.qkv_proj = nn.Linear(cfg.dim, 3 * cfg.dim, bias=False)
        self.o_proj = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.post_norm = nn.RMSNorm(cfg.dim)
        self.gate_up = nn.Linear(cfg.dim, 4 * cfg.dim, bias=False)
        self.down = nn.Linear(2 * cfg.dim, cfg.dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv_proj(self.input_norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(h.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class CausalLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.embed_pos = nn.Embedding(cfg.max_len, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.dim)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids) + self.embed_pos.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def masked_cross_entropy(logits, labels, num_label_tokens=None):
    """Sum of the token losses, or their mean if the number of tokens is given."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    if num_label_tokens is not None:
        loss = loss / num_label_tokens
    return loss


def make_examples(cfg, n, seed):
    """Questions of random length with the reversed question as answer."""
    g = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(n):
        q = int(torch.randint(2, cfg.max_len // 2, (1,), generator=g))
        question = torch.randint(1, cfg.vocab, (q,), generator=g)
        ids = F.pad(torch.cat([question, question.flip(0)]), (0, cfg.max_len + 1 - 2 * q))
        labels = ids.clone()
        labels[:q] = IGNORE_INDEX
        labels[2 * q :] = IGNORE_INDEX
        examples.append({"input_ids": ids[:-1], "labels": labels[1:]})
    return examples


def collate(examples):
    return {k: torch.stack([e[k] for e in examples]) for k in examples[0]}


class Recipe:
    def __init__(self, cfg):
        self.cfg = cfg
        self.setup()

    def setup(self):
        cfg = self.cfg
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.rank != 0:
            logger.setLevel(logging.WARNING)
        torch.manual_seed(cfg.seed)
        self.model = CausalLM(cfg).to(self.device)
        mesh = init_device_mesh(self.device.type, (self.dp_size,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.max_steps, eta_min=cfg.lr * 0.1)
        self.local_batch = cfg.local_batch_divisor // self.dp_size
        self.train_set = make_examples(cfg, cfg.max_steps * cfg.grad_acc_steps * cfg.local_batch_divisor, cfg.seed)
        self.val_set = make_examples(cfg, cfg.val_samples, cfg.seed + 1)
        self.best_val = float("inf")

    def batches(self, examples):
        size = self.local_batch * self.dp_size
        for start in range(0, len(examples), size):
            mine = examples[start + self.rank * self.local_batch : start + (self.rank + 1) * self.local_batch]
            yield {k: v.to(self.device) for k, v in collate(mine).items()}

    def dp_allreduce(self, value):
        value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(value)
        return value.item()

    def forward_backward_step(self, batch, *, loss_buffer, num_label_tokens, is_train=True):
        labels = batch.pop("labels")
        logits = self.model(**batch)
        loss = masked_cross_entropy(logits, labels, num_label_tokens=num_label_tokens)
        loss_buffer.append(loss.detach().clone())
        if is_train:
            (loss * self.dp_size).backward()

    def run_train_step(self, batches):
        num_label_tokens = self.dp_allreduce(sum((b["labels"] != IGNORE_INDEX).sum() for b in batches))
        loss_buffer = []
        for batch in batches:
            self.forward_backward_step(batch, loss_buffer=loss_buffer, num_label_tokens=num_label_tokens)
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return self.dp_allreduce(torch.stack(loss_buffer).sum()), grad_norm.full_tensor().item()

    @torch.no_grad()
    def run_validation_epoch(self):
        self.model.eval()
        total_loss, total_tokens = 0.0, 0
        for batch in self.batches(self.val_set):
            loss_buffer = []
            num_label_tokens = (batch["labels"] != IGNORE_INDEX).sum().item()
            self.forward_backward_step(
                batch,
                loss_buffer=loss_buffer,
                num_label_tokens=None,
                is_train=False,
            )
            total_loss += torch.stack(loss_buffer).sum().item()
            total_tokens += num_label_tokens
        total_loss = self.dp_allreduce(total_loss)
        total_tokens = self.dp_allreduce(total_tokens)
        self.model.train()
        return total_loss / max(total_tokens, 1e-8)

    def run_train_validation_loop(self):
        cfg = self.cfg
        stream = self.batches(self.train_set)
        for step in range(1, cfg.max_steps + 1):
            batches = [next(stream) for _ in range(cfg.grad_acc_steps)]
            loss, grad_norm = self.run_train_step(batches)
            if step % 4 == 0 or step == 1:
                logger.info("step %d | loss %.6f | grad_norm %.4f", step, loss, grad_norm)
            if step % cfg.val_every_steps == 0:
                val_loss = self.run_validation_epoch()
                improved = val_loss < self.best_val
                self.best_val = min(self.best_val, val_loss)
                logger.info("[val] step %d | loss %.6f%s", step, val_loss, " (best)" if improved else "")
        if self.rank == 0:
            print(json.dumps({"train_loss": round(loss, 6), "best_val_loss": round(self.best_val, 6)}))
        dist.destroy_process_group()


if __name__ == "__main__":
    Recipe(Config()).run_train_validation_loop()
