"""DPO with a precomputed table of reference log probabilities, epochs over shuffled pairs, DCP checkpoints."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model import Llamalet
from pairs import VOCAB, pair
from table import answer_logp, reference_table

PAIRS = 80


def order(epoch):
    return torch.randperm(PAIRS, generator=torch.Generator().manual_seed(epoch)).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--beta", type=float, default=0.2)
    ap.add_argument("--sft-weight", type=float, default=0.02)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(23)
    model = Llamalet(VOCAB, dim=16, heads=2, depth=2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.0)

    done = 0
    if a.resume:
        last = max(os.listdir(a.resume))
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "opt": o, "table": torch.empty(PAIRS, 2)}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, last))
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        table, done = sd["table"], int(last.split("-")[1])
    else:
        table = reference_table(model, pair, PAIRS, rank, world)

    per_epoch = PAIRS // a.batch
    for step in range(done, a.epochs * per_epoch):
        epoch, k = divmod(step, per_epoch)
        ids = order(epoch)[k * a.batch:(k + 1) * a.batch][rank::world]
        c, r, m = (torch.tensor(t) for t in zip(*(pair(i) for i in ids)))
        both = answer_logp(model, torch.cat([c, r]), torch.cat([m, m]).float())
        chosen, rejected = both.chunk(2)
        margin = a.beta * ((chosen - table[ids, 0]) - (rejected - table[ids, 1]))
        # a mean over pairs, and a per-answer mean: both are means over equally many pairs on each rank
        loss = -F.logsigmoid(margin).mean() - a.sft_weight * (chosen / m.sum(1)).mean()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        s = torch.stack([loss.detach(), (margin > 0).float().mean()]) / world
        dist.all_reduce(s)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"epoch {epoch} step {step + 1} loss {s[0]:.4f} accuracy {s[1]:.2f}", flush=True)
        if a.out and a.save_every and (step + 1) % a.save_every == 0:
            ms, os_ = get_state_dict(model, opt)
            dcp.save({"model": ms, "opt": os_, "table": table}, checkpoint_id=os.path.join(a.out, f"dpo-{step + 1:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
