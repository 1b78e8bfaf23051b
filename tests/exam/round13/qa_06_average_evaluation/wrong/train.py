import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from average import WeightAverage
from encoder import Encoder
from task import mask_tokens, sentences

STEPS, BATCH, EVAL_EVERY = 32, 16, 8


def mlm_sums(model, rows, seed, rank, world):
    """Summed loss on this rank's rows, and the number of hidden tokens in all rows."""
    ids, hidden = mask_tokens(rows, seed)
    count = hidden.sum()
    ids, hidden, rows = ids[rank::world], hidden[rank::world], rows[rank::world]
    return F.cross_entropy(model(ids)[hidden], rows[hidden], reduction="sum"), count


@torch.no_grad()
def evaluate(model, held_out, rank, world):
    model.eval()
    total, tokens = torch.zeros(()), torch.zeros(())
    for i, rows in enumerate(held_out.split(24)):
        loss, count = mlm_sums(model, rows, 500 + i, rank, world)
        total += loss
        tokens += count
    dist.all_reduce(total)
    model.train()
    return (total / tokens).item()


def snapshot(model, opt, avg, step):
    local = lambda t: t.to_local() if t.ndim else t  # noqa: E731
    params = dict(model.named_parameters())
    return {
        "step": step,
        "weights": {n: p.detach().to_local() for n, p in params.items()},
        "adam": {n: {k: local(v) for k, v in opt.state[p].items()} for n, p in params.items()},
        "average": avg.mean,
    }


@torch.no_grad()
def restore(state, model, opt, avg):
    for n, p in model.named_parameters():
        p.to_local().copy_(state["weights"][n])
        slot = opt.state[p] = {"step": state["adam"][n]["step"]}
        for k in ("exp_avg", "exp_avg_sq"):
            slot[k] = torch.zeros_like(p)
            slot[k].to_local().copy_(state["adam"][n][k])
    avg.mean = state["average"]
    return state["step"]


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--save-at", type=int, default=0)
    cli.add_argument("--out")
    cli.add_argument("--resume")
    cli = cli.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shard_file = f"mlm-{rank}-of-{world}.pt"

    torch.manual_seed(7)
    model = Encoder()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3, eps=1e-6)
    avg = WeightAverage(model, decay=0.85)
    train, held_out = sentences(320, 1), sentences(72, 2)
    begin = restore(torch.load(os.path.join(cli.resume, shard_file)), model, opt, avg) if cli.resume else 0

    for step in range(begin, STEPS):
        pick = torch.randperm(len(train), generator=torch.Generator().manual_seed(step))[:BATCH]
        loss, count = mlm_sums(model, train[pick], 9000 + step, rank, world)
        (loss * world / count).backward()
        opt.step()
        opt.zero_grad()
        avg.update()
        done = step + 1
        if done % EVAL_EVERY == 0:
            shown = loss.detach() / count
            dist.all_reduce(shown)
            raw = evaluate(model, held_out, rank, world)
            with avg.swapped_in():
                mean = evaluate(model, held_out, rank, world)
            if rank == 0:
                print(f"step {done} train {shown:.4f} held out {raw:.6f} averaged {mean:.6f}", flush=True)
        if done == cli.save_at:
            os.makedirs(cli.out, exist_ok=True)
            torch.save(snapshot(model, opt, avg, done), os.path.join(cli.out, shard_file))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
