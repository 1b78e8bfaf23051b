"""Fine-tune a small causal LM with LoRA adapters and export a merged checkpoint."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from export import export_merged
from model import LoRALM

VOCAB, SEQ, BATCH = 48, 16, 16


def make_corpus(n=256):
    g = torch.Generator().manual_seed(7)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    return (start + stride * torch.arange(SEQ + 1)) % VOCAB


def batch_for(corpus, step, rank, world):
    g = torch.Generator().manual_seed(1000 + step)
    idx = torch.randperm(len(corpus), generator=g)[:BATCH]
    return corpus[idx[rank::world]]


def lm_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def save(root, step, model, opt):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "optim": o, "step": torch.tensor(step)}, checkpoint_id=str(Path(root) / f"step_{step:05d}"))


def resume(root, model, opt):
    last = sorted(Path(root).glob("step_*"))[-1]
    m, o = get_state_dict(model, opt)
    state = {"model": m, "optim": o, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=str(last))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export", default="out/merged.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LoRALM(VOCAB)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)

    corpus = make_corpus()
    start = resume(args.resume, model, opt) if args.resume else 0
    for step in range(start, args.steps):
        loss = lm_loss(model, batch_for(corpus, step, rank, world))
        loss.backward()
        opt.step()
        opt.zero_grad()
        dist.all_reduce(loss := loss.detach().clone())
        if rank == 0 and (step % 4 == 0 or step == args.steps - 1):
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt)

    export_merged(model, Path(args.export), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
