"""Dense retriever: two towers, in-batch negatives from all ranks, a learned temperature that is not sharded."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gradcache import cached_step
from towers import Retriever

VOCAB, BATCH, CHUNK = 50, 32, 4


def pairs(step):
    """A document repeats part of its query's words in another order, among other words."""
    g = torch.Generator().manual_seed(70 + step)
    queries = torch.randint(0, VOCAB, (BATCH, 5), generator=g)
    keep = torch.rand(BATCH, 5, generator=g).argsort(1)[:, :3]
    documents = torch.cat([queries.gather(1, keep), torch.randint(0, VOCAB, (BATCH, 4), generator=g)], 1)
    return queries, documents


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = Retriever(VOCAB)
    for tower in (model.query, model.document):
        fully_shard(tower)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    # one number: every rank keeps it and computes the same gradient from the gathered embeddings
    log_scale = torch.nn.Parameter(torch.tensor(2.0))
    scale_opt = torch.optim.SGD([log_scale], lr=0.05, momentum=0.5)

    step = 0
    if args.resume:
        folder = os.path.join(args.resume, max(os.listdir(args.resume)))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        extra = torch.load(os.path.join(folder, "scale.pt"))
        with torch.no_grad():
            log_scale.copy_(extra["log_scale"])
        scale_opt.load_state_dict(extra["scale_opt"])
        step = extra["step"]

    while step < args.steps:
        queries, documents = (x.chunk(world)[rank] for x in pairs(step))
        loss = cached_step(model, queries, documents, log_scale, CHUNK)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in (opt, scale_opt):
            o.step()
            o.zero_grad()
        step += 1
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.5f} scale {log_scale.exp().item():.6f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            folder = os.path.join(args.out, f"{step:05d}")
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o}, checkpoint_id=folder)
            if rank == 0:
                extra = {"log_scale": log_scale.detach(), "scale_opt": scale_opt.state_dict(), "step": step}
                torch.save(extra, os.path.join(folder, "scale.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
