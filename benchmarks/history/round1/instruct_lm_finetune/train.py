"""Instruction fine-tuning of a small decoder-only language model with FSDP2.

Run with ``torchrun --nproc-per-node N train.py``. Pass ``--ckpt DIR`` and
``--checkpoint-every N`` to write checkpoints and ``--resume`` to continue the
last one found in the directory.
"""
import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, PAD, MAX_LEN = 64, 0, 20


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ffn(self.ffn_norm(x))


class DecoderLM(nn.Module):
    def __init__(self, dim=32, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(MAX_LEN, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_corpus(num, seed):
    """Sequences of varying length; the first third is the prompt."""
    g = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, VOCAB, dtype=torch.float)
    tokens = torch.multinomial(weights.expand(num, -1), MAX_LEN, replacement=True, generator=g) + 1
    lengths = torch.randint(MAX_LEN // 2, MAX_LEN + 1, (num, 1), generator=g)
    pos = torch.arange(MAX_LEN)
    tokens = tokens.masked_fill(pos >= lengths, PAD)
    target_mask = (pos >= lengths // 3) & (pos < lengths)
    return tokens, target_mask


def summed_nll(model, tokens, target_mask):
    logits = model(tokens[:, :-1])
    nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    mask = target_mask[:, 1:].flatten()
    return (nll * mask).sum(), mask.sum()


class CheckpointManager:
    """Keeps ``step_N`` directories and the validation score of each of them."""

    def __init__(self, root):
        self.root = Path(root)
        self.scores_dir = self.root / "scores"
        if dist.get_rank() == 0:
            self.scores_dir.mkdir(parents=True, exist_ok=True)
        dist.barrier()

    def save(self, step, model, optimizer, trainer_state, score):
        tmp, final = self.root / f"step_{step}.tmp", self.root / f"step_{step}"
        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=str(tmp / "trainer"))
        if dist.get_rank() == 0:
            torch.save(trainer_state, tmp / "state.pt")
            (self.scores_dir / f"step_{step}.txt").write_text(f"{score!r}\n")
            tmp.rename(final)
        dist.barrier()

    def load(self, step, model, optimizer):
        step_dir = self.root / f"step_{step}"
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=str(step_dir / "trainer"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return torch.load(step_dir / "state.pt")

    def get_step_numbers(self, exclude_model_only=False):
        step_numbers = []
        for step_dir in self.root.glob("step_*"):
            if not step_dir.is_dir() or not step_dir.name[5:].isdigit():
                continue
            step = int(step_dir.name[5:])
            if exclude_model_only:
                # Skip directories that hold nothing but the weights.
                if (step_dir / "trainer").exists():
                    step_numbers.append(step)
            else:
                step_numbers.append(step)
        return sorted(step_numbers)

    def load_scores(self):
        scores = []
        for step in self.get_step_numbers():
            score_file = self.scores_dir / f"step_{step}.txt"
            if score_file.exists():
                scores.append((float(score_file.read_text()), step))
        return sorted(scores, reverse=True)

    def delete_stale(self, keep_last, keep_best):
        steps = self.get_step_numbers()
        keep = set(steps[-keep_last:]) | {step for _, step in self.load_scores()[:keep_best]}
        dist.barrier()
        if dist.get_rank() == 0:
            for step in steps:
                if step not in keep:
                    shutil.rmtree(self.root / f"step_{step}")
                    (self.scores_dir / f"step_{step}.txt").unlink(missing_ok=True)
        dist.barrier()


@torch.no_grad()
def validate(model, tokens, mask, rank, world):
    model.eval()
    totals = torch.zeros(2, device=tokens.device)
    for i in range(0, len(tokens), 16):
        rows = slice(i + rank * 16 // world, i + (rank + 1) * 16 // world)
        nll, num = summed_nll(model, tokens[rows], mask[rows])
        totals += torch.stack([nll, num.float()])
    dist.all_reduce(totals)
    model.train()
    return -(totals[0] / totals[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--validate-every", type=int, default=6)
    p.add_argument("--checkpoint-every", type=int, default=0)
    p.add_argument("--keep-last", type=int, default=2)
    p.add_argument("--keep-best", type=int, default=1)
    p.add_argument("--ckpt", default=None)
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(1)
    model = DecoderLM().to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    train_tokens, train_mask = (t.to(device) for t in make_corpus(32, seed=10))
    valid_tokens, valid_mask = (t.to(device) for t in make_corpus(64, seed=11))

    manager = CheckpointManager(args.ckpt) if args.ckpt else None
    start, best_score, best_step = 0, float("-inf"), -1
    if args.resume:
        last = manager.get_step_numbers(exclude_model_only=True)[-1]
        start = manager.load(last, model, optimizer)["step"]
        scores = manager.load_scores()
        if scores:
            best_score, best_step = scores[0]
        dist.barrier()
        if rank == 0:
            print(f"resumed from step {start}")

    for step in range(start, args.steps):
        order = torch.randperm(len(train_tokens), generator=torch.Generator().manual_seed(step))
        rows = order[: args.batch_size].chunk(world)[rank].to(device)
        loss, num_targets = summed_nll(model, train_tokens[rows], train_mask[rows])
        total = torch.stack([loss.detach(), num_targets.float()])
        dist.all_reduce(total)
        # Gradients are averaged over the ranks, the loss is a mean over tokens.
        (loss * world / total[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if rank == 0:
            print(f"step {done:3d} loss {(total[0] / total[1]).item():.6f}")

        if done % args.validate_every == 0:
            score = validate(model, valid_tokens, valid_mask, rank, world)
            if score > best_score:
                best_score, best_step = score, done
                if manager is not None:
                    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
                    if rank == 0:
                        torch.save({"model": full, "step": done}, manager.root / "best_model.pt")
            if rank == 0:
                print(f"step {done:3d} valid score {score:.6f} best {best_score:.6f} at step {best_step}")
            if args.checkpoint_every and done % args.checkpoint_every == 0:
                manager.save(done, model, optimizer, {"step": done}, score)
                manager.delete_stale(args.keep_last, args.keep_best)

    if rank == 0:
        print(f"finished: best valid score {best_score:.6f} at step {best_step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
