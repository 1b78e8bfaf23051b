"""Caption model: an image feature vector is turned into prefix tokens, a small
decoder writes the caption.  Captions differ in length, padding is masked with -100.

The trainer is modelled on the usual one: the model computes its own loss, the trainer
asks whether the model can take the number of label tokens of the whole step.
"""
from __future__ import annotations

import argparse
import inspect
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, MAX_LEN, FEATURES, PREFIX = 32, 12, 16, 2


class CaptionData:
    """Class c (of 10) has a feature prototype and a fixed phrase of 4 to 11 words."""

    def __init__(self, size: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(10, FEATURES, generator=g)
        kind = torch.randint(0, 10, (size,), generator=g)
        self.features = proto[kind] + 0.3 * torch.randn(size, FEATURES, generator=g)
        phrases = torch.zeros(10, MAX_LEN, dtype=torch.long)
        for c in range(10):
            n = int(torch.randint(4, MAX_LEN, (1,), generator=g))
            phrases[c, :n] = torch.randint(2, VOCAB, (n,), generator=g)
        self.tokens = phrases[kind]

    def __len__(self):
        return len(self.tokens)

    def batch(self, idx: torch.Tensor, device) -> dict[str, torch.Tensor]:
        tokens = self.tokens[idx].to(device)
        begin = torch.ones_like(tokens[:, :1])
        return {
            "features": self.features[idx].to(device),
            "input_ids": torch.cat([begin, tokens[:, :-1]], dim=1),
            "labels": tokens.masked_fill(tokens == 0, -100),
        }


class DecoderLayer(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Captioner(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 2):
        super().__init__()
        self.dim = dim
        self.project = nn.Linear(FEATURES, PREFIX * dim)
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(0.02 * torch.randn(PREFIX + MAX_LEN, dim))
        self.layers = nn.ModuleList(DecoderLayer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, features, input_ids, labels):
        prefix = self.project(features).view(-1, PREFIX, self.dim)
        x = torch.cat([prefix, self.embed(input_ids)], dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x[:, PREFIX:]))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Trainer:
    def __init__(self, args, data, device):
        self.args, self.data, self.device = args, data, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = Captioner().to(device)
        self.model_accepts_loss_kwargs = "num_items_in_batch" in inspect.signature(self.model.forward).parameters
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.accumulation = args.global_batch // (args.micro_batch * self.world)

    def get_batch_samples(self, step):
        g = torch.Generator().manual_seed(self.args.seed + 77 * step)
        order = torch.randperm(len(self.data), generator=g)[: self.args.global_batch]
        micro = order.chunk(self.world)[self.rank].split(self.args.micro_batch)
        samples = [self.data.batch(idx, self.device) for idx in micro]
        num_items_in_batch = torch.stack([(s["labels"] != -100).sum() for s in samples]).sum()
        dist.all_reduce(num_items_in_batch)
        if not self.model_accepts_loss_kwargs:
            num_items_in_batch = None
        return samples, num_items_in_batch

    def compute_loss(self, inputs, num_items_in_batch):
        if self.model_accepts_loss_kwargs:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        return self.model(**inputs)

    def training_step(self, inputs, num_items_in_batch=None):
        loss = self.compute_loss(inputs, num_items_in_batch)
        if num_items_in_batch is None:
            loss = loss / self.accumulation
        loss.backward()
        return loss.detach()

    def train(self):
        for step in range(self.args.max_steps):
            samples, num_items_in_batch = self.get_batch_samples(step)
            tr_loss = torch.zeros((), device=self.device)
            for i, inputs in enumerate(samples):
                self.model.set_requires_gradient_sync(i + 1 == len(samples))
                tr_loss += self.training_step(inputs, num_items_in_batch)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            norm = norm.full_tensor()
            self.optimizer.step()
            self.optimizer.zero_grad()
            dist.all_reduce(tr_loss)
            if self.rank == 0:
                print({"step": step, "loss": round(tr_loss.item() / self.world, 5), "grad_norm": round(norm.item(), 4)}, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=24)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--max-grad-norm", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    Trainer(args, CaptionData(400, seed=8), device).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
