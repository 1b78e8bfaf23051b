"""Supervised fine-tuning on long conversations, the sequence split over the ranks.

All ranks work on the same conversations.  Every rank holds a contiguous piece of the
sequence; keys and values are gathered for the attention and the per-token log
probabilities for the loss.
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

IGNORE_INDEX = -100


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=2)
    p.add_argument("--cutoff-len", type=int, default=62)
    p.add_argument("--max-positions", type=int, default=64)
    p.add_argument("--vocab", type=int, default=48)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        pieces = grad.chunk(dist.get_world_size(ctx.group), dim=ctx.dim)
        return pieces[dist.get_rank(ctx.group)].contiguous(), None, None


def gather_sequence(x, dim, group):
    return _GatherSequence.apply(x, dim, group)


class Attention(nn.Module):
    def __init__(self, hidden, heads, group):
        super().__init__()
        self.heads, self.group = heads, group
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, positions):
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        k = gather_sequence(k, 2, self.group)
        v = gather_sequence(v, 2, self.group)
        scores = q @ k.transpose(-1, -2) / math.sqrt(h // self.heads)
        keys = torch.arange(k.size(2), device=x.device)
        scores = scores.masked_fill(keys[None, :] > positions[:, None], float("-inf"))
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class DecoderLayer(nn.Module):
    def __init__(self, hidden, heads, group):
        super().__init__()
        self.input_norm = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, group)
        self.post_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x, positions):
        x = x + self.attn(self.input_norm(x), positions)
        return x + self.mlp(self.post_norm(x))


class CausalLM(nn.Module):
    def __init__(self, args, max_len, group):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden)
        self.pos = nn.Embedding(max_len, args.hidden)
        self.layers = nn.ModuleList(DecoderLayer(args.hidden, args.heads, group) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.lm_head = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, input_ids, positions):
        x = self.embed(input_ids) + self.pos(positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


def make_conversations(step, args):
    """Prompt followed by a reply that repeats the prompt shifted by one symbol."""
    g = torch.Generator().manual_seed(args.seed * 1000 + step)
    input_ids = torch.zeros(args.batch_size, args.cutoff_len, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    loss_weights = torch.zeros(args.batch_size, args.cutoff_len)
    for i in range(args.batch_size):
        n = int(torch.randint(args.cutoff_len // 4, args.cutoff_len // 2, (1,), generator=g))
        prompt = (torch.randint(0, 6, (1,), generator=g) + torch.arange(n) * 2) % (args.vocab - 2) + 2
        reply = (prompt - 1) % (args.vocab - 2) + 2
        ids = torch.cat([prompt, torch.ones(1, dtype=torch.long), reply])[: args.cutoff_len]
        input_ids[i, : ids.numel()] = ids
        labels[i, n + 1 : ids.numel()] = ids[n + 1 :]
        loss_weights[i, n + 1 : ids.numel()] = 1.0
    return {"input_ids": input_ids, "labels": labels, "loss_weights": loss_weights}


def pad_and_split(data, group):
    """Pad to a multiple of the group size and keep this rank's piece of the sequence."""
    cp_size, cp_rank = dist.get_world_size(group), dist.get_rank(group)
    pad_values = {"labels": IGNORE_INDEX, "loss_weights": 0.0, "input_ids": 0}
    out = {}
    for name, value in data.items():
        pad = (cp_size - value.size(-1) % cp_size) % cp_size
        value = F.pad(value, (0, pad), value=pad_values[name])
        out[name] = value.chunk(cp_size, dim=-1)[cp_rank].contiguous()
    return out


def sequence_parallel_loss(model, inputs, group):
    cp_size, cp_rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = pad_and_split(inputs, group)
    batch_size, local_len = inputs["labels"].shape
    positions = cp_rank * local_len + torch.arange(local_len, device=inputs["input_ids"].device)

    logits = model(inputs["input_ids"], positions).float()

    # the target of the last token of a piece lies on the next rank
    labels = inputs["labels"]
    global_labels = [torch.empty_like(labels) for _ in range(cp_size)]
    dist.all_gather(global_labels, labels, group=group)
    labels = torch.cat(global_labels, dim=1)
    shift_labels = labels[..., 1:].contiguous()
    shift_labels = F.pad(shift_labels, (0, 1), value=IGNORE_INDEX)
    shift_labels = torch.chunk(shift_labels, cp_size, dim=-1)[cp_rank].reshape(-1)

    weights = inputs["loss_weights"]
    global_weights = [torch.empty_like(weights) for _ in range(cp_size)]
    dist.all_gather(global_weights, weights, group=group)
    shift_weights = torch.cat(global_weights, dim=1)[..., 1:].contiguous()

    shift_logits = logits.view(-1, logits.size(-1))
    log_probs = -F.cross_entropy(shift_logits, shift_labels, reduction="none", ignore_index=IGNORE_INDEX)
    log_probs = gather_sequence(log_probs.view(batch_size, -1), 1, group)[..., :-1]
    return (-log_probs * shift_weights).sum() / (shift_weights.sum() + 1e-6)


def main():
    args = parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",))
    group = mesh.get_group("cp")

    torch.manual_seed(args.seed)
    model = CausalLM(args, args.max_positions, group).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    for step in range(1, args.steps + 1):
        tic = time.time()
        batch = {k: v.to(device) for k, v in make_conversations(step, args).items()}
        loss = sequence_parallel_loss(model, batch, group)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and (step % 4 == 0 or step == 1):
            print(f"step {step:3d} loss {loss.item():.6f} grad_norm {grad_norm.item():.5f} "
                  f"lr {scheduler.get_last_lr()[0]:.2e} {time.time() - tic:.2f}s", flush=True)

    total = sum(p.full_tensor().double().abs().sum() for p in model.parameters())
    with torch.no_grad():
        held_out = {k: v.to(device) for k, v in make_conversations(10_000, args).items()}
        val = sequence_parallel_loss(model, held_out, group)
    if rank == 0:
        print(f"held-out loss {val.item():.6f}  weights |sum| {total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
