import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pcgrad import PCGrad
from tasks import Log, SharedBottom


def batches(log, size, epochs, done):
    """Endless-looking generator of (position, rows); the order depends on the epoch only."""
    per_epoch = len(log.u) // size
    for pos in range(done, epochs * per_epoch):
        epoch, k = divmod(pos, per_epoch)
        order = torch.randperm(len(log.u), generator=torch.Generator().manual_seed(600 + epoch))
        yield pos, order[k * size : (k + 1) * size]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--ckpt")
    ap.add_argument("--every", type=int, default=25)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(9)
    model = SharedBottom()
    fully_shard(model.bottom, mesh=mesh)
    for head in model.heads.values():
        fully_shard(head, mesh=mesh)
    fully_shard(model, mesh=mesh)

    tables = list(model.users.parameters()) + list(model.items.parameters())
    dense = list(model.bottom.parameters()) + list(model.heads.parameters())
    opt = torch.optim.AdamW([{"params": tables, "weight_decay": 0.0, "lr": 4e-2}, {"params": dense, "lr": 1e-2}], eps=1e-4)
    gen = torch.Generator().manual_seed(10)
    surgeon = PCGrad(model.parameters(), gen)
    log = Log(1024, seed=1)

    def everything(done):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "gen": gen.get_state(), "done": torch.tensor([done, surgeon.conflicts])}

    done = 0
    if args.resume:
        folder = os.path.dirname(sorted(glob.glob(os.path.join(args.resume, "*", ".metadata")))[-1])
        state = everything(0)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        gen.set_state(state["gen"])
        done, surgeon.conflicts = state["done"].tolist()

    for pos, idx in batches(log, args.batch, args.epochs, done):
        u, i, click, watch = log.rows(idx.chunk(world)[rank])
        # the clicked rows are spread unevenly, so the mean is taken over the global batch
        clicked = log.click[idx].sum()
        per_task, shown = [], []
        for task in ("click", "watch"):
            out = model(u, i, task)
            if task == "click":
                loss = F.binary_cross_entropy_with_logits(out, click, reduction="sum") / len(idx)
            else:
                loss = (F.smooth_l1_loss(out, watch, reduction="none") * click).sum() / clicked
            # gradients are averaged over the ranks, the loss is a sum of their parts
            (loss * world).backward()
            per_task.append(surgeon.take())
            shown.append(loss.detach())
        surgeon.merge(per_task)
        opt.step()
        opt.zero_grad()

        if (pos + 1) % 16 == 0:
            values = torch.stack(shown)
            dist.all_reduce(values)
            if rank == 0:
                print(f"step {pos + 1} click {values[0]:.4f} watch {values[1]:.4f} conflicts {surgeon.conflicts}", flush=True)
        if args.ckpt and (pos + 1) % args.every == 0:
            dcp.save(everything(pos + 1), checkpoint_id=os.path.join(args.ckpt, f"{pos + 1:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
