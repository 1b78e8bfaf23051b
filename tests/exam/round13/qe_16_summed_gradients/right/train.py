import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from events import logs
from model import EventModel
from trainer import Trainer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--micro", type=int, default=4)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    model = EventModel()
    shards = [fully_shard(m, reshard_after_forward=False) for m in (*model.cells, model)]
    for m in shards:
        m.set_gradient_divide_factor(1.0)
        m.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, eps=1e-5, weight_decay=0.0)
    trainer = Trainer(model, optimizer, logs, args.micro)

    if args.resume:
        folder = os.path.join(args.resume, max(os.listdir(args.resume)))
        weights, optim = get_state_dict(model, optimizer)
        dcp.load({"weights": weights, "optim": optim}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
        trainer.load_state_dict(torch.load(os.path.join(folder, "trainer.pt")))
    while trainer.step < args.steps:
        loss, norm, applied = trainer.run_step()
        if dist.get_rank() == 0 and (trainer.step % 5 == 0 or not applied):
            print(f"{trainer.step:3d} loss {loss:.5f} norm {norm:.4f}{'' if applied else ' left out'}", flush=True)
        if args.save_every and trainer.step % args.save_every == 0:
            folder = os.path.join(args.out, f"{trainer.step:05d}")
            weights, optim = get_state_dict(model, optimizer)
            dcp.save({"weights": weights, "optim": optim}, checkpoint_id=folder)
            if dist.get_rank() == 0:
                torch.save(trainer.state_dict(), os.path.join(folder, "trainer.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
