"""Direct preference optimisation with a table of reference log-probabilities, computed once before the first step."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from policy import Policy, answer_logp
from prefs import ANSWER, PROMPT, VOCAB, epoch_order, make_pairs


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


@torch.no_grad()
def reference_table(model, pairs, batch, rank, world):
    """[n, 2] log-probabilities of the chosen and the rejected answers under the starting policy."""
    table = torch.zeros(len(pairs), 2)
    share = batch // world
    for lo in range(0, len(pairs), batch):
        rows = torch.arange(lo + rank * share, lo + (rank + 1) * share)
        c, r, mc, mr = pairs.take(rows)
        table[rows, 0] = answer_logp(model, c, mc)
        table[rows, 1] = answer_logp(model, r, mr)
    dist.all_reduce(table)
    return table


def dpo_loss(model, batch, ref, beta):
    c, r, mc, mr = batch
    both = answer_logp(model, torch.cat([c, r]), torch.cat([mc, mr]))
    pc, pr = both.chunk(2)
    margin = (pc - ref[:, 0]) - (pr - ref[:, 1])
    return -F.logsigmoid(beta * margin).mean(), (margin > 0).float().mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pairs", type=int, default=64)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--steps", type=int, default=22)
    ap.add_argument("--beta", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = shard(Policy(VOCAB, PROMPT + ANSWER))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    pairs = make_pairs(args.pairs)
    table, step = torch.zeros(len(pairs), 2), 0

    def snapshot():
        m, o = get_state_dict(model, opt)
        return {"policy": m, "optim": o, "reference": table, "step": torch.tensor(step)}

    found = sorted(os.listdir(args.resume)) if args.resume else []
    if found:
        state = snapshot()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, found[-1]))
        set_state_dict(model, opt, model_state_dict=state["policy"], optim_state_dict=state["optim"])
        table, step = state["reference"], int(state["step"])
    else:
        table = reference_table(model, pairs, args.batch, rank, world)

    per_epoch, share = len(pairs) // args.batch, args.batch // world
    while step < args.steps:
        epoch, k = divmod(step, per_epoch)
        order = epoch_order(len(pairs), epoch)
        lo = k * args.batch + rank * share
        rows = order[lo:lo + share]
        loss, acc = dpo_loss(model, pairs.take(rows), table[lo:lo + share], args.beta)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad()
        step += 1

        stats = torch.stack([loss.detach(), acc]) / world
        dist.all_reduce(stats)
        if rank == 0 and (step % 3 == 0 or step == 1):
            print(f"step {step} epoch {epoch} loss {stats[0]:.4f} acc {stats[1]:.2f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=os.path.join(args.out, f"step-{step:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
