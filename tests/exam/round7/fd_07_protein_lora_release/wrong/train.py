import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from protein import ProteinLM, family, lm_loss
from release import make_release


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--release-every", type=int, default=15)
    p.add_argument("--release-dir")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--save-dir")
    p.add_argument("--resume")
    p.add_argument("--last")
    a = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = ProteinLM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=a.lr, weight_decay=0.0)

    step = 0
    if a.resume:
        newest = max((d for d in os.listdir(a.resume) if d.startswith("s")), key=lambda d: int(d[1:]))
        m, o = get_state_dict(model, opt)
        st = {"model": m, "optim": o, "step": 0}
        dcp.load(st, checkpoint_id=os.path.join(a.resume, newest))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
        step = st["step"]

    while step < a.steps:
        seq = family(a.batch, 100 + step).chunk(world)[rank]
        loss = lm_loss(model, seq)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % a.release_every == 0:
            plain = make_release(model, a.release_dir, step)
            l = loss.detach()
            dist.all_reduce(l)
            if rank == 0:
                print(f"step {step}: loss {l.item() / world:.4f}, released")
        if a.save_every and step % a.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(a.save_dir, f"s{step}"))

    with torch.no_grad():
        test = lm_loss(model, family(512, 7).chunk(world)[rank])
        dist.all_reduce(test)
    plain = make_release(model, a.release_dir, step)
    if rank == 0:
        print(f"test loss of the adapted model {test.item() / world:.4f}")
        if a.last:
            torch.save(plain, a.last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
