import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from averaging import EMA
from model import RetLM


def text(seed, n, ctx=20, vocab=48):
    """Sequences that follow one of four fixed permutations of the vocabulary."""
    perms = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(s)) for s in range(4)])
    g = torch.Generator().manual_seed(seed)
    which = torch.randint(0, 4, (n,), generator=g)
    x = [torch.randint(0, vocab, (n,), generator=g)]
    for _ in range(ctx):
        x.append(perms[which, x[-1]])
    return torch.stack(x, dim=1)


def lm_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, ids, world):
    loss = lm_loss(model, ids)
    model.reshard()
    dist.all_reduce(loss)
    return loss.item() / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--eval-every", type=int, default=3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def mine(ids):
        return ids[rank * len(ids) // world : (rank + 1) * len(ids) // world]

    torch.manual_seed(14)
    model = RetLM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    ema = EMA(model.parameters(), 0.9)
    valid = mine(text(999_999, 32))

    def state():
        m, o = get_state_dict(model, opt)
        return {"model": m, "optim": o, "ema": dict(zip([n for n, _ in model.named_parameters()], ema.avg))}

    step = 0
    if args.resume:
        step = max(int(d) for d in os.listdir(args.resume))
        st = state()
        dcp.load(st, checkpoint_id=os.path.join(args.resume, str(step)))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"])

    while step < args.steps:
        loss = lm_loss(model, mine(text(step, args.batch)))
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update()
        step += 1
        if step % args.eval_every == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            with ema.applied():
                value = evaluate(model, valid, world)
            if rank == 0:
                print(f"step {step} train {shown.item() / world:.4f} averaged model, valid {value:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, str(step)))

    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
