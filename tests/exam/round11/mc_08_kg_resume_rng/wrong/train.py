"""Link prediction on a knowledge graph with sampled negatives; every rank draws its own negatives and dropout masks."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import state
from kg import ComplEx, make_triples


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    triples, entities, relations = make_triples()
    torch.manual_seed(args.seed)
    model = ComplEx(entities, relations)
    fully_shard(model)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=8, gamma=0.7)
    torch.manual_seed(args.seed + 1 + rank)

    step = state.load_newest(args.resume, model, opt, sched) if args.resume else 0
    per_epoch = len(triples) // args.batch
    while step < args.steps:
        epoch, at = divmod(step, per_epoch)
        order = torch.randperm(len(triples), generator=torch.Generator().manual_seed(epoch))
        batch = triples[order[at * args.batch:(at + 1) * args.batch]][rank::world]
        h, r, t = batch.unbind(1)
        noise = torch.randint(entities, (len(batch), args.negatives))
        scores = model(h, r, torch.cat([t[:, None], noise], dim=1))
        loss = F.cross_entropy(scores, torch.zeros(len(batch), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        step += 1
        if step % 4 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item():.5f}")
        if args.save_every and step % args.save_every == 0:
            state.save(args.out, step, model, opt, sched)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=120)
    ap.add_argument("--negatives", type=int, default=12)
    ap.add_argument("--seed", type=int, default=70)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    dist.init_process_group("gloo")
    run(ap.parse_args())
    dist.destroy_process_group()
