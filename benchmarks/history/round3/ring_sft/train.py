"""Supervised training of a small decoder; the ranks of a ring share each sequence (context parallelism)."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ_LEN = 20, 32


class GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; the backward sums the gradients and returns the own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, position_ids, group):
        b, t, d = x.shape
        h = self.ln1(x)
        k, v = GatherSequence.apply(self.kv(h), group).chunk(2, dim=-1)
        q, k, v = (y.view(b, -1, self.heads, d // self.heads).transpose(1, 2) for y in (self.q(h), k, v))
        mask = position_ids[:, None] >= torch.arange(k.shape[2], device=x.device)[None, :]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class Actor(nn.Module):
    def __init__(self, dim=24, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(SEQ_LEN, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, ids, position_ids, group):
        x = self.wte(ids) + self.wpe(position_ids)
        for block in self.blocks:
            x = block(x, position_ids, group)
        return self.head(self.norm(x))


def sample(seed, index):
    """A periodic sequence with noise."""
    g = torch.Generator().manual_seed(seed * 104729 + index)
    motif = torch.randint(VOCAB, (int(torch.randint(2, 6, (1,), generator=g)),), generator=g)
    ids = motif.repeat(SEQ_LEN + 1)[: SEQ_LEN + 1].clone()
    flip = torch.rand(SEQ_LEN + 1, generator=g) < 0.05
    ids[flip] = torch.randint(VOCAB, (int(flip.sum()),), generator=g)
    return ids


class Strategy:
    def __init__(self, args):
        self.args = args
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.world_size = dist.get_world_size()
        self.ring_attn_size = args.ring_attn_size or self.world_size
        mesh = init_device_mesh(
            self.device.type, (self.world_size // self.ring_attn_size, self.ring_attn_size), mesh_dim_names=("dp", "ring")
        )
        self.ring_group, self.ring_rank = mesh.get_group("ring"), mesh.get_local_rank("ring")
        self.dp_rank, self.dp_size = mesh.get_local_rank("dp"), mesh.size(0)
        self.mesh = init_device_mesh(self.device.type, (self.world_size,))
        self.accumulated_gradient = (
            args.train_batch_size * self.ring_attn_size // args.micro_train_batch_size // self.world_size
        )
        self.micro_step = 0

    def prepare(self, model):
        model = model.to(self.device)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    def micro_batch(self, step):
        """The rows of this data-parallel rank and, of those, this rank's part of the sequence."""
        rows = step * self.args.micro_train_batch_size * self.dp_size
        rows = range(rows + self.dp_rank, rows + self.args.micro_train_batch_size * self.dp_size, self.dp_size)
        ids = torch.stack([sample(self.args.seed, i) for i in rows]).to(self.device)
        positions = torch.arange(SEQ_LEN, device=self.device).chunk(self.ring_attn_size)[self.ring_rank]
        return ids[:, positions], ids[:, positions + 1], positions

    def backward(self, loss):
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, optimizer, model, scheduler):
        self.micro_step += 1
        if self.micro_step % self.accumulated_gradient:
            return None
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return norm.full_tensor().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max_samples", type=int, default=400)
    p.add_argument("--train_batch_size", type=int, default=20)
    p.add_argument("--micro_train_batch_size", type=int, default=4)
    p.add_argument("--ring_attn_size", type=int, default=0, help="0: one ring over all ranks")
    p.add_argument("--learning_rate", type=float, default=5e-3)
    p.add_argument("--max_norm", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=42)
    args = p.parse_args()
    strategy = Strategy(args)
    torch.manual_seed(args.seed)
    model = strategy.prepare(Actor())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    max_steps = args.max_samples // args.train_batch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: max(0.1, 0.5 * (1 + math.cos(math.pi * min(s, max_steps) / max_steps)))
    )

    update, window = 0, []
    for step in range(args.max_samples // (args.micro_train_batch_size * strategy.dp_size)):
        ids, labels, positions = strategy.micro_batch(step)
        logits = model(ids, positions, strategy.ring_group)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
        strategy.backward(loss)
        window.append(loss.detach())
        norm = strategy.optimizer_step(optimizer, model, scheduler)
        if norm is None:
            continue
        update += 1
        mean = torch.stack(window).mean()
        window.clear()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and (update % 4 == 0 or update == 1):
            print(
                f"update {update:3d} samples {(step + 1) * args.micro_train_batch_size * strategy.dp_size:4d} "
                f"gpt_loss {mean.item() / strategy.world_size:.6f} grad_norm {norm:.5f}",
                flush=True,
            )

    weight = sum(q.full_tensor().double().abs().sum() for q in model.parameters()).item()
    if dist.get_rank() == 0:
        print(f"updates {update} lr {scheduler.get_last_lr()[0]:.6f} |w| {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
