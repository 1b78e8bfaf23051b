"""Pretrain a small GPT-NeoX style language model with FSDP2."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--train-iters", type=int, default=24)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--seq-len", type=int, default=32)
    p.add_argument("--hidden", type=int, default=24)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--heads", type=int, default=2)
    p.add_argument("--vocab", type=int, default=48)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--min-lr", type=float, default=1e-3)
    p.add_argument("--warmup", type=float, default=0.2)
    p.add_argument("--decay-style", choices=["linear", "cosine", "exponential", "constant"], default="cosine")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--save", default=None)
    p.add_argument("--save-interval", type=int, default=0)
    p.add_argument("--load", default=None)
    return p.parse_args()


def print_rank_0(msg):
    if dist.get_rank() == 0:
        print(msg, flush=True)


class AnnealingLR:
    """Linear warmup followed by a decay, set on every parameter group."""

    def __init__(self, optimizer, start_lr, warmup_iter, total_iters, decay_style, last_iter=0, min_lr=0.0):
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.min_lr = min_lr
        self.warmup_iter = warmup_iter
        self.end_iter = total_iters
        self.decay_style = decay_style
        self.num_iters = last_iter
        self.step(self.num_iters)

    def get_lr(self):
        it = self.num_iters
        if self.warmup_iter > 0 and it <= self.warmup_iter:
            return float(self.start_lr) * max(1, it) / self.warmup_iter

        it = it - self.warmup_iter
        span = self.end_iter - self.warmup_iter
        if self.decay_style == "linear":
            lr = self.start_lr * (span - it) / span
        elif self.decay_style == "cosine":
            lr = self.min_lr + (self.start_lr - self.min_lr) / 2.0 * (math.cos(math.pi * it / span) + 1)
        elif self.decay_style == "exponential":
            lr = self.start_lr * math.exp(-0.693 * it / span)
        else:
            lr = self.start_lr
        return max(lr, self.min_lr)

    def step(self, step_num=None):
        if step_num is None:
            step_num = self.num_iters + 1
        self.num_iters = step_num
        lr = self.get_lr()
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def state_dict(self):
        keys = ("start_lr", "min_lr", "warmup_iter", "end_iter", "decay_style", "num_iters")
        return {k: getattr(self, k) for k in keys}

    def load_state_dict(self, sd):
        for k, v in sd.items():
            setattr(self, k, v)
        self.step(self.num_iters)


class Layer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.ln_attn = nn.LayerNorm(hidden)
        self.ln_mlp = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln_attn(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        # parallel residual
        return x + self.dense(a) + self.down(F.gelu(self.up(self.ln_mlp(x))))


class NeoX(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden)
        self.pos = nn.Embedding(args.seq_len, args.hidden)
        self.layers = nn.ModuleList(Layer(args.hidden, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class MarkovText:
    """Byte-like text from a fixed transition table; a batch is a function of its index."""

    def __init__(self, vocab, seq_len, seed):
        g = torch.Generator().manual_seed(seed)
        self.table = torch.softmax(3.0 * torch.randn(vocab, vocab, generator=g), -1)
        self.vocab, self.seq_len, self.seed = vocab, seq_len, seed

    def batch(self, index, size):
        g = torch.Generator().manual_seed(self.seed * 100003 + index)
        ids = [torch.randint(self.vocab, (size,), generator=g)]
        for _ in range(self.seq_len):
            ids.append(torch.multinomial(self.table[ids[-1]], 1, generator=g).squeeze(1))
        return torch.stack(ids, 1)


def main():
    args = get_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed)
    model = NeoX(args).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    lr_scheduler = AnnealingLR(
        optimizer,
        start_lr=args.lr,
        warmup_iter=int(args.warmup * args.train_iters),
        total_iters=args.train_iters,
        decay_style=args.decay_style,
        min_lr=args.min_lr,
    )
    text = MarkovText(args.vocab, args.seq_len, args.seed)
    iteration = 0

    def checkpoint_state():
        msd, osd = get_state_dict(model, optimizer)
        return {"model": msd, "optim": osd, "sched": lr_scheduler.state_dict(), "iteration": iteration}

    if args.load:
        state = checkpoint_state()
        dcp.load(state, checkpoint_id=args.load)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        lr_scheduler.load_state_dict(state["sched"])
        iteration = state["iteration"]
        print_rank_0(f"loaded {args.load} at iteration {iteration}")

    local = args.global_batch // world
    model.train()
    while iteration < args.train_iters:
        ids = text.batch(iteration, args.global_batch)[rank * local : (rank + 1) * local].to(device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        used_lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        lr_scheduler.step()
        iteration += 1

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if iteration % 4 == 0 or iteration == 1:
            print_rank_0(
                f"iteration {iteration:4d}/{args.train_iters} | lr {used_lr:.3e} | "
                f"lm loss {mean.item() / world:.6f} | grad norm {grad_norm.item():.4f}"
            )
        if args.save and args.save_interval and iteration == args.save_interval:
            dcp.save(checkpoint_state(), checkpoint_id=args.save)
            print_rank_0(f"saved {args.save} at iteration {iteration}")

    norm = math.sqrt(sum(p.full_tensor().double().square().sum().item() for p in model.parameters()))
    model.eval()
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for i in range(4):
            ids = text.batch(10_000 + i, args.global_batch)[rank * local : (rank + 1) * local].to(device)
            total += F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    dist.all_reduce(total)
    val = total.item() / (4 * world)
    print_rank_0(f"validation loss {val:.6f} | ppl {math.exp(val):.4f} | weight norm {norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
