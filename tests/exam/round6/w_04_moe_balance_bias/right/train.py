"""Small MoE language model on a mixture of languages, balanced without an auxiliary loss."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from balance import LoadBalancer
from moe import MoELM

VOCAB, BATCH, LENGTH = 64, 16, 20


def corpus_batch(step):
    """Each quarter of the batch comes from one language (a Markov chain on its own symbols)."""
    g = torch.Generator().manual_seed(1234 + step)
    seqs = []
    for lang in range(4):
        ids = torch.randint(16, (BATCH // 4, 1), generator=g)
        for _ in range(LENGTH):
            jump = torch.randint(3, (BATCH // 4, 1), generator=g)
            ids = torch.cat([ids, (ids[:, -1:] * (lang + 2) + jump + 1) % 16], dim=1)
        seqs.append(ids + 16 * lang)
    return torch.cat(seqs)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--dir", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(42)
    model = MoELM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda s: min(1.0, (s + 1) / 5))
    balancer = LoadBalancer(model)

    step = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[-1]))
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        step = state["step"]

    while step < args.steps:
        ids = corpus_batch(step).chunk(world)[rank]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optim.step()
        sched.step()
        optim.zero_grad()
        balancer.step()
        step += 1
        if step % 4 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f} violation {balancer.violation:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "sched": sched.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.dir, f"moe-{step}"))
    print(f"rank {rank} bias {[round(v, 3) for v in model.blocks[0].moe.bias.tolist()]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
