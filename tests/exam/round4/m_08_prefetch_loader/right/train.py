import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import store
from lm import build
from loader import PrefetchLoader, Source


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpts")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=1.5e-2, eps=1e-6)
    loader = PrefetchLoader(Source(), a.batch, rank, world)
    step = store.load(a.resume, model, opt, loader) if a.resume else 0

    for ids, tgt in loader:
        loss = F.cross_entropy(model(ids).flatten(0, 1), tgt.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = 1.5e-2 * min(1.0, (step + 1) / 3, 1.2 - step / a.steps)
        opt.step()
        opt.zero_grad()
        step += 1
        avg = loss.detach() / world
        dist.all_reduce(avg)
        if rank == 0:
            print(f"iter {step} | ppl {avg.exp().item():.3f}", flush=True)
        if a.save_every and step % a.save_every == 0:
            store.save(a.out, step, model, opt, loader)
        if step >= (a.stop_at or a.steps):
            break
    loader.close()

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save(sd, a.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
