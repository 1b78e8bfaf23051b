import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from data import VOCAB, Chains
from lawa import Lawa
from model import RNNLM


def save(root, step, model, opt, lawa):
    d = pathlib.Path(root) / f"it{step:06d}"
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "opt": o, "lawa": lawa.state_dict()}, checkpoint_id=str(d))
    if dist.get_rank() == 0:
        torch.save({"step": step, "snapshots": len(lawa.window)}, d / "meta.pt")
    dist.barrier()


def resume(root, model, opt, lawa):
    d = sorted(p for p in pathlib.Path(root).glob("it*") if (p / "meta.pt").exists())[-1]
    meta = torch.load(d / "meta.pt")
    m, o = get_state_dict(model, opt)
    sd = {"model": m, "opt": o, "lawa": lawa.template(model, meta["snapshots"])}
    dcp.load(sd, checkpoint_id=str(d))
    set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
    return meta["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--snap-every", type=int, default=2)
    ap.add_argument("--snaps", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="lawa_ckpt")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None, help="file for the averaged weights")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = RNNLM(VOCAB)
    for l in model.layers:
        fully_shard(l)
    fully_shard(model)
    opt = torch.optim.NAdam(model.parameters(), lr=a.lr)
    lawa, data, step = Lawa(a.snaps), Chains(), 0
    if a.resume:
        step = resume(a.resume, model, opt, lawa)

    while step < a.steps:
        x = data.batch(step, a.batch).chunk(world)[rank]
        loss = cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        opt.zero_grad()
        step += 1
        if step % a.snap_every == 0:
            lawa.push(model)
        s = loss.detach().clone()
        dist.all_reduce(s)
        if rank == 0:
            print(f"step {step} loss {s.item() / world:.4f}", flush=True)
        if a.save_every and step % a.save_every == 0:
            save(a.out, step, model, opt, lawa)

    model.load_state_dict(lawa.average())
    test = data.batch(10**6, 64).chunk(world)[rank]
    with torch.no_grad():
        v = cross_entropy(model(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten())
    dist.all_reduce(v)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"averaged over {len(lawa.window)} snapshots, held-out loss {v.item() / world:.4f}")
        if a.export:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
