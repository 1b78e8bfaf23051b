import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import checkpoint
from loader import Corpus, StatefulLoader
from model import build


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    ap.add_argument("--log-ids", action="store_true", help="print the sample ids that rank 0 has used")
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)
    loader = StatefulLoader(Corpus(), 48, rank, world)
    state = checkpoint.TrainState(model, opt, loader, sched)
    if args.resume:
        checkpoint.load_newest(args.resume, state)

    for ids, x, y in loader:
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        state.step += 1
        if args.out and args.save_every and state.step % args.save_every == 0:
            checkpoint.save(args.out, state)
        dist.all_reduce(shown := loss.detach().clone())
        if rank == 0:
            extra = f" ids {ids[:6].tolist()}" if args.log_ids else ""
            print(f"step {state.step} loss {shown.item() / world:.4f}{extra}", flush=True)
        if state.step >= args.steps:
            break

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
