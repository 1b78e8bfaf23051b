"""Character language model: meta-device construction, FSDP2, AdamW with decay groups, per-rank checkpoint files."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sharding import build_sharded
from transformer import CharLM

VOCAB, LENGTH = 64, 32


def make_corpus(n=20000):
    """A second-order Markov text with a skewed alphabet."""
    g = torch.Generator().manual_seed(99)
    jump = torch.randint(0, VOCAB, (VOCAB, 4), generator=g)
    choice = torch.multinomial(torch.tensor([0.6, 0.25, 0.1, 0.05]), n, replacement=True, generator=g).tolist()
    jump = jump.tolist()
    text = [1, 2]
    for c in choice:
        text.append((jump[text[-1]][c] + text[-2] % 2) % VOCAB)
    return torch.tensor(text)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build_sharded(CharLM, seed=1234)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                             {"params": rest, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.95))
    corpus = make_corpus()
    begin = 0
    if args.resume:
        path = sorted(glob.glob(os.path.join(args.resume, "it*")))[-1]
        state = torch.load(os.path.join(path, f"part{rank}of{world}.pt"), weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        begin = state["it"]

    for it in range(begin, args.steps):
        g = torch.Generator().manual_seed(it)
        at = torch.randint(0, len(corpus) - LENGTH - 1, (args.batch,), generator=g)
        at = at[rank::world]
        ids = corpus[at[:, None] + torch.arange(LENGTH + 1)]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (it + 1) % 5 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"it {it + 1} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            folder = os.path.join(args.out, f"it{it + 1:06d}")
            os.makedirs(folder, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "it": it + 1},
                       os.path.join(folder, f"part{rank}of{world}.pt"))
            dist.barrier()

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
