"""Direct Preference Optimisation with FSDP2: a trained policy against a frozen reference.

torchrun --standalone --nproc-per-node 2 dpo_train.py --output-dir out/dpo --save-steps 3
torchrun --standalone --nproc-per-node 2 dpo_train.py --output-dir out/dpo --resume-from out/dpo

args: --max-steps 5
save_args: --save-steps 3 --output-dir {checkpoint}
resume_args: --resume-from {checkpoint}
"""

from __future__ import annotations

import argparse
import json
import logging
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

log = logging.getLogger("dpo")
PAD, BOS = 0, 1


def cli() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--max-steps", type=int, default=5)
    ap.add_argument(
        "--pairs-per-step", type=int, default=16, help="preference pairs in one optimizer step, over all ranks"
    )
    ap.add_argument("--micro-pairs", type=int, default=2, help="pairs in one forward")
    ap.add_argument("--beta", type=float, default=0.5)
    ap.add_argument("--label-smoothing", type=float, default=0.0)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--warmup-steps", type=int, default=2)
    ap.add_argument("--schedule-steps", type=int, default=30)
    ap.add_argument("--max-grad-norm", type=float, default=2.0)
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--layers", type=int, default=3)
    ap.add_argument("--vocab", type=int, default=96)
    ap.add_argument("--max-len", type=int, default=24)
    ap.add_argument("--freeze-embeddings", action="store_true", default=True)
    ap.add_argument("--save-steps", type=int, default=0)
    ap.add_argument("--output-dir", type=Path, default=Path("out/dpo"))
    ap.add_argument("--resume-from", type=Path)
    ap.add_argument("--seed", type=int, default=11)
    return ap.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.heads, self.kv_heads, self.hd = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.kv_proj = nn.Linear(dim, 2 * kv_heads * self.hd, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.attn_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, mask):
        b, t, d = x.shape
        h = self.attn_norm(x)
        q = self.q_proj(h).view(b, t, self.heads, self.hd).transpose(1, 2)
        k, v = self.kv_proj(h).view(b, t, 2, self.kv_heads, self.hd).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o_proj(a.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class CausalLM(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: int, max_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.positions = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        t = ids.size(1)
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        mask = causal & (ids != PAD)[:, None, None, :]
        x = self.embed(ids) + self.positions(torch.arange(t, device=ids.device))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class PreferencePairs:
    """Prompt, a preferred answer (counts up from the prompt) and a rejected one (random), of random lengths."""

    def __init__(self, vocab: int, max_len: int, seed: int):
        self.vocab, self.max_len, self.seed = vocab, max_len, seed

    def pair(self, index: int):
        g = torch.Generator().manual_seed(self.seed * 7_368_787 + index)

        def draw(lo, hi, n=1):
            return torch.randint(lo, hi, (n,), generator=g).tolist()

        prompt = [BOS, *draw(2, self.vocab, draw(2, 7)[0])]
        good = [2 + (prompt[-1] + k) % (self.vocab - 2) for k in range(draw(3, self.max_len - 8)[0])]
        bad = draw(2, self.vocab, draw(3, self.max_len - 8)[0])
        return prompt, good, bad

    def collate(self, indices):
        """Chosen sequences first, then the rejected ones, right padded; the mask marks the answer's tokens."""
        pairs = [self.pair(i) for i in indices]
        rows = [(p, g) for p, g, _ in pairs] + [(p, b) for p, _, b in pairs]
        width = max(len(p) + len(a) for p, a in rows)
        ids, answer = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.bool)
        for r, (p, a) in enumerate(rows):
            ids[r, : len(p) + len(a)] = torch.tensor(p + a)
            answer[r, len(p) : len(p) + len(a)] = True
        return ids, answer


def sequence_logps(model, ids, answer):
    logps = model(ids[:, :-1]).float().log_softmax(-1)
    picked = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (picked * answer[:, 1:]).sum(-1)


def dpo_loss(policy_logps, ref_logps, beta, smoothing):
    rewards = beta * (policy_logps - ref_logps)
    chosen, rejected = rewards.chunk(2)
    margin = chosen - rejected
    losses = -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing
    return losses, margin.detach()


def shard_model(model: CausalLM, recompute: bool) -> CausalLM:
    for i, layer in enumerate(model.layers):
        if recompute:
            model.layers[i] = layer = checkpoint_wrapper(layer)
        fully_shard(layer)
    return fully_shard(model)


def build_model(args, recompute: bool) -> CausalLM:
    torch.manual_seed(args.seed)  # the same "SFT" weights for the policy and for the reference, on every rank
    model = CausalLM(args.vocab, args.dim, args.layers, args.max_len)
    return shard_model(model, recompute)


def save(args, step, policy, optimizer, scheduler):
    folder = args.output_dir / f"step-{step:06d}"
    model_sd, optim_sd = get_state_dict(policy, optimizer)
    dcp.save(
        {"policy": model_sd, "optimizer": optim_sd, "scheduler": scheduler.state_dict(), "step": step},
        checkpoint_id=str(folder),
    )
    if dist.get_rank() == 0:
        (args.output_dir / "latest.json").write_text(json.dumps({"folder": folder.name, "step": step}))
    dist.barrier()
    log.info("saved %s", folder.name)


def load(args, policy, optimizer, scheduler) -> int:
    folder = args.resume_from / json.loads((args.resume_from / "latest.json").read_text())["folder"]
    model_sd, optim_sd = get_state_dict(policy, optimizer)
    state = {"policy": model_sd, "optimizer": optim_sd, "scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=state["policy"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=True),
    )
    scheduler.load_state_dict(state["scheduler"])
    log.info("resumed from %s", folder.name)
    return state["step"]


@torch.no_grad()
def evaluate(policy: FSDPModule, reference: FSDPModule, pairs, args, n: int = 16):
    policy.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    stats = torch.zeros(3)
    ids, answer = pairs.collate(range(rank, n, world))
    losses, margin = dpo_loss(
        sequence_logps(policy, ids, answer), sequence_logps(reference, ids, answer), args.beta, 0.0
    )
    stats += torch.tensor([losses.sum(), (margin > 0).sum(), margin.sum()])
    dist.all_reduce(stats)
    policy.train()
    return (stats / n).tolist()


def main():
    args = cli()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="[%(name)s] %(message)s")
    local_pairs = args.pairs_per_step // world
    if args.pairs_per_step % world or local_pairs % args.micro_pairs:
        raise SystemExit("--pairs-per-step must be a multiple of ranks x --micro-pairs")
    n_micro = local_pairs // args.micro_pairs

    policy = build_model(args, recompute=True)
    if args.freeze_embeddings:
        policy.embed.requires_grad_(False)
        policy.positions.requires_grad_(False)
    reference = build_model(args, recompute=False).eval().requires_grad_(False)

    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 0.25, 1.0, args.warmup_steps),
            CosineAnnealingLR(optimizer, args.schedule_steps, eta_min=1e-5),
        ],
        milestones=[args.warmup_steps],
    )
    if rank == 0:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    start = load(args, policy, optimizer, scheduler) if args.resume_from else 0

    train_pairs, eval_pairs = PreferencePairs(args.vocab, args.max_len, 3), PreferencePairs(args.vocab, args.max_len, 4)
    for step in range(start, args.max_steps):
        stats = torch.zeros(3)
        for m in range(n_micro):
            last = m == n_micro - 1
            policy.set_is_last_backward(last)
            policy.set_requires_gradient_sync(last)
            first = step * args.pairs_per_step + rank * local_pairs + m * args.micro_pairs
            ids, answer = train_pairs.collate(range(first, first + args.micro_pairs))
            with torch.no_grad() if not reference.training else nullcontext():
                ref_logps = sequence_logps(reference, ids, answer)
            losses, margin = dpo_loss(sequence_logps(policy, ids, answer), ref_logps, args.beta, args.label_smoothing)
            (losses.mean() / n_micro).backward()
            stats += torch.stack([losses.detach().sum(), (margin > 0).sum().float(), margin.sum()])
        norm = torch.nn.utils.clip_grad_norm_(trainable, args.max_grad_norm).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        dist.all_reduce(stats)
        loss, acc, mean_margin = (stats / args.pairs_per_step).tolist()
        lr = scheduler.get_last_lr()[0]
        log.info(
            "step %d loss %.6f acc %.3f margin %.5f grad %.5f lr %.2e",
            step + 1,
            loss,
            acc,
            mean_margin,
            norm.item(),
            lr,
        )
        if (step + 1) % 2 == 0:
            log.info(
                "step %d eval loss %.6f acc %.3f margin %.5f", step + 1, *evaluate(policy, reference, eval_pairs, args)
            )
        if args.save_steps and (step + 1) % args.save_steps == 0:
            save(args, step + 1, policy, optimizer, scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
