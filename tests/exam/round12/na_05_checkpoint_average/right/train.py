"""Translation with a sequence-to-sequence transformer; the delivered model is the average of the last checkpoints."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from averaging import LastAverage
from seq2seq import Seq2Seq

WORDS, LEN = 24, 8


def sentences(seed, n):
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(WORDS, (n, LEN), generator=g)
    # the target language puts the two halves the other way round and has other words
    tgt = (torch.cat([src[:, LEN // 2:], src[:, :LEN // 2]], 1) * 7 + 5) % WORDS
    return src, tgt


@torch.no_grad()
def valid_nll(model, rank, world, n=32):
    src, tgt = sentences(999_999, n)
    mine = slice(rank * n // world, (rank + 1) * n // world)
    nll = F.cross_entropy(model(src[mine], tgt[mine]).flatten(0, 1), tgt[mine].flatten(), reduction="sum")
    dist.all_reduce(nll)
    return nll.item() / tgt.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--snapshot-every", type=int, default=3)
    ap.add_argument("--keep", type=int, default=4)
    ap.add_argument("--out", default="")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(77)
    model = Seq2Seq(WORDS, WORDS, LEN)
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=a.lr, betas=(0.9, 0.98))
    average = LastAverage(a.keep)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "optim": o, "average": average.state_dict(), "step": torch.tensor(step)}

    first = 0
    folders = [d for d in os.listdir(a.resume) if re.fullmatch(r"ck\d+", d)] if a.resume else []
    if folders:
        newest = max(folders, key=lambda d: int(d[2:]))
        for _ in range(min(a.keep, int(newest[2:]) // a.snapshot_every)):
            average.add(model)  # room for the snapshots
        s = state(0)
        dcp.load(s, checkpoint_id=os.path.join(a.resume, newest))
        set_state_dict(model, opt, model_state_dict=s["model"], optim_state_dict=s["optim"])
        average.load_state_dict(s["average"])
        first = int(s["step"])

    for step in range(first + 1, a.steps + 1):
        src, tgt = sentences(step, a.batch)
        src, tgt = src.chunk(world)[rank], tgt.chunk(world)[rank]
        for group in opt.param_groups:
            group["lr"] = a.lr * min(step / 6, (6 / step) ** 0.5)
        loss = F.cross_entropy(model(src, tgt).flatten(0, 1), tgt.flatten(), label_smoothing=0.05)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % a.snapshot_every == 0:
            average.add(model)
        if step % 4 == 0 or step == 1:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item():.4f}", flush=True)
        if a.out and a.save_every and step % a.save_every == 0:
            dcp.save(state(step), checkpoint_id=os.path.join(a.out, f"ck{step}"))

    average.apply_to(model)
    if a.out:
        full = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(full, os.path.join(a.out, "averaged.pt"))
        dist.barrier()
    nll = valid_nll(model, rank, world)
    if rank == 0:
        print(f"average of {len(average.kept)} checkpoints: valid nll {nll:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
