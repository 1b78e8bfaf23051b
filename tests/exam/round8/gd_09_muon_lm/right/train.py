"""Language model on nested brackets: Muon for hidden matrices, Adam for embeddings, head and norms.
Weight-decayed towards the initial weights; lengths grow during training."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from muon import Muon
from transformer import CharLM

KINDS, STEPS, BATCH = 15, 20, 16
PAD = 2 * KINDS


def bracket_text(length, g):
    out, stack = [], []
    while len(out) < length:
        if stack and torch.rand(1, generator=g) < 0.5:
            out.append(stack.pop() + KINDS)
        else:
            kind = int(torch.randint(KINDS, (1,), generator=g))
            stack.append(kind)
            out.append(kind)
    return out


def curriculum():
    """Yields (step, inputs, targets) of the global batch; the context grows from 12 to 32."""
    for step in range(STEPS):
        g = torch.Generator().manual_seed(31 * step + 5)
        length = 12 + (32 - 12) * step // (STEPS - 1)
        rows = []
        for _ in range(BATCH):
            n = int(torch.randint(length // 2, length + 1, (1,), generator=g))
            rows.append(bracket_text(n + 1, g) + [PAD] * (length - n))
        ids = torch.tensor(rows)
        yield step, ids[:, :-1], ids[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = CharLM(vocab=PAD + 2, dim=32, layers=2, length=33)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    hidden = {n: p for n, p in model.named_parameters() if n.startswith("layers") and p.dim() == 2}
    other = {n: p for n, p in model.named_parameters() if n not in hidden}
    muon = Muon(hidden.values(), lr=0.02)
    adam = torch.optim.Adam(other.values(), lr=5e-3, betas=(0.9, 0.95), eps=1e-6)
    anchor = {n: p.detach().clone() for n, p in model.named_parameters()}

    def tensors():
        """Everything of the training state, by name."""
        state = {"anchor": anchor, "weight": {n: p.detach() for n, p in model.named_parameters()}}
        state["muon"] = {n: muon.state[p]["momentum"] for n, p in hidden.items()}
        for key in ("exp_avg", "exp_avg_sq", "step"):
            state[key] = {n: adam.state[p][key] for n, p in other.items()}
        return state

    done = 0
    if args.resume:
        for p in hidden.values():
            muon.state[p]["momentum"] = torch.zeros_like(p)
        for p in other.values():
            adam.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        done = max(int(d) for d in os.listdir(args.resume))
        dcp.load(tensors(), checkpoint_id=os.path.join(args.resume, str(done)))

    for step, x, y in curriculum():
        if step < done:
            continue
        tokens = (y != PAD).sum()
        x, y = x[rank::world], y[rank::world]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
        (loss * world / tokens).backward()
        muon.step()
        adam.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.lerp_(anchor[n], 0.002)
        model.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"step {step + 1} loss {shown.item() / tokens.item():.4f} context {x.shape[1]}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(tensors(), checkpoint_id=os.path.join(args.out, str(step + 1)))

    if args.export:
        full = {n: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
