# Topic classification with a small encoder, trained with the REX learning rate
# schedule (reflected exponential, arXiv:2107.04197).

import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEED = 5
VOCAB, TOPICS, LENGTH = 60, 6, 20
DIM, HEADS, LAYERS = 24, 4, 2
GLOBAL_BATCH, STEPS, WARMUP = 16, 60, 0
MAX_LR, MIN_LR, HEAD_LR_SCALE = 3e-3, 3e-5, 2.0
LOG_EVERY = 6


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_attn = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.ln_ff = nn.LayerNorm(DIM)
        self.ff_in = nn.Linear(DIM, 4 * DIM)
        self.ff_out = nn.Linear(4 * DIM, DIM)

    def forward(self, h):
        b, t, _ = h.shape
        q, k, v = self.qkv(self.ln_attn(h)).chunk(3, dim=-1)
        q, k, v = (z.view(b, t, HEADS, DIM // HEADS).transpose(1, 2) for z in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, DIM)
        h = h + self.proj(a)
        return h + self.ff_out(F.gelu(self.ff_in(self.ln_ff(h))))


class TopicModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.classifier = nn.Linear(DIM, TOPICS)

    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.classifier(self.norm(h).mean(dim=1))


class RexSchedule:
    """Linear warmup followed by a reflected exponential decay to min_lr.

    The learning rates may be floats or scalar tensors; a tensor is written in
    place, as a compiled optimizer step holds on to it.
    """

    def __init__(self, optimizer, max_lr, min_lr, total_steps, num_warmup_steps=0):
        if min_lr > max_lr:
            raise ValueError(f"min_lr={min_lr} is larger than max_lr={max_lr}")
        if num_warmup_steps > total_steps:
            raise ValueError(f"num_warmup_steps={num_warmup_steps} exceeds total_steps={total_steps}")
        self.optimizer = optimizer
        self.min_ratio = min_lr / max_lr
        self.total_steps = total_steps
        self.num_warmup_steps = num_warmup_steps
        self.last_step = 0
        for group in optimizer.param_groups:
            lr = group["lr"]
            group.setdefault("initial_lr", lr.clone() if torch.is_tensor(lr) else lr)
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self._apply()

    def factor(self):
        if self.last_step < self.num_warmup_steps:
            return (self.last_step + 1) / self.num_warmup_steps
        remaining = self.total_steps - self.num_warmup_steps
        step_after = self.last_step - self.num_warmup_steps
        if step_after >= remaining:
            return self.min_ratio
        z = (remaining - step_after) / remaining
        return self.min_ratio + (1.0 - self.min_ratio) * z / (0.1 + 0.9 * z)

    def _apply(self):
        factor = self.factor()
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs):
            if torch.is_tensor(group["lr"]):
                group["lr"].copy_(base_lr * factor)
            else:
                group["lr"] = base_lr * factor

    def step(self):
        self.last_step += 1
        self._apply()


def make_corpus(n, seed):
    """Documents are drawn from the word distribution of their topic, with some noise."""
    g = torch.Generator().manual_seed(1234)
    word_logits = 1.2 * torch.randn(TOPICS, VOCAB, generator=g)
    g.manual_seed(seed)
    labels = torch.randint(0, TOPICS, (n,), generator=g)
    tokens = torch.multinomial(word_logits[labels].softmax(-1), LENGTH, replacement=True, generator=g)
    noise = torch.rand(n, generator=g) < 0.1
    labels = torch.where(noise, torch.randint(0, TOPICS, (n,), generator=g), labels)
    return tokens, labels


def build_optimizer(model, device):
    head = [p for n, p in model.named_parameters() if n.startswith("classifier")]
    decay = [p for n, p in model.named_parameters() if not n.startswith("classifier") and p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if not n.startswith("classifier") and p.ndim == 1]
    groups = [
        {"params": decay, "lr": torch.tensor(MAX_LR, device=device), "weight_decay": 0.05},
        {"params": plain, "lr": torch.tensor(MAX_LR, device=device), "weight_decay": 0.0},
        {"params": head, "lr": torch.tensor(MAX_LR * HEAD_LR_SCALE, device=device), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), foreach=False)


@torch.no_grad()
def evaluate(model, tokens, labels, rank, world_size, device):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64, device=device)
    shard = slice(rank * len(tokens) // world_size, (rank + 1) * len(tokens) // world_size)
    for x, y in zip(tokens[shard].split(32), labels[shard].split(32)):
        x, y = x.to(device), y.to(device)
        logits = model(x)
        stats[0] += F.cross_entropy(logits, y, reduction="sum")
        stats[1] += (logits.argmax(-1) == y).sum()
        stats[2] += len(y)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(SEED)

    model = TopicModel().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = build_optimizer(model, device)
    schedule = RexSchedule(optimizer, MAX_LR, MIN_LR, total_steps=STEPS, num_warmup_steps=WARMUP)

    tokens, labels = make_corpus(512, SEED)
    val_tokens, val_labels = make_corpus(128, SEED + 1)
    per_rank = GLOBAL_BATCH // world_size
    steps_per_epoch = len(tokens) // GLOBAL_BATCH

    for step in range(STEPS):
        epoch, i = divmod(step, steps_per_epoch)
        if i == 0:
            g = torch.Generator().manual_seed(SEED + epoch)
            order = torch.randperm(len(tokens), generator=g)
        start = i * GLOBAL_BATCH + rank * per_rank
        index = order[start : start + per_rank]
        x, y = tokens[index].to(device), labels[index].to(device)

        loss = F.cross_entropy(model(x), y)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        lr = optimizer.param_groups[0]["lr"].item()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        mean_loss /= world_size
        if not math.isfinite(mean_loss.item()):
            raise RuntimeError(f"loss is {mean_loss.item()} at step {step}")
        if rank == 0 and (step % LOG_EVERY == 0 or step == STEPS - 1):
            print(f"step {step:3d} loss {mean_loss.item():.6f} grad_norm {grad_norm.item():.4f} lr {lr:.3e}", flush=True)

    val_loss, val_acc = evaluate(model, val_tokens, val_labels, rank, world_size, device)
    model.reshard()
    checksum = sum(p.full_tensor().double().abs().sum().item() for p in model.parameters())
    if rank == 0:
        print(f"validation loss {val_loss:.6f} accuracy {val_acc:.4f} weights {checksum:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
