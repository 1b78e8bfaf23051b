import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from keywords import KeywordNet, clips
from sam import SAM

OPTS = StateDictOptions(full_state_dict=True, cpu_offload=True)


class SaveCallback:
    """Rank 0 writes one file with full tensors; only the two newest are kept."""

    def __init__(self, out, every):
        self.out, self.every = out, every

    def __call__(self, step, model, opt, plateau):
        if not self.every or step % self.every:
            return
        m, o = get_state_dict(model, opt, options=OPTS)
        if dist.get_rank() == 0:
            folder = os.path.join(self.out, f"step_{step:04d}")
            os.makedirs(folder, exist_ok=True)
            torch.save({"model": m, "opt": o, "plateau": plateau.state_dict(), "step": step}, folder + "/all.pt")
            for old in sorted(os.listdir(self.out))[:-2]:
                shutil.rmtree(os.path.join(self.out, old))
        dist.barrier()


def loss_sum(model, x, y, global_batch, world):
    # sum over own clips / global batch; the average over the ranks is undone by the factor world
    return F.cross_entropy(model(x), y, label_smoothing=0.05, reduction="sum") * world / global_batch


@torch.no_grad()
def validation_loss(model, rank, world):
    x, y = clips(64, 10**6)
    part = slice(rank, None, world)
    total = F.cross_entropy(model(x[part]), y[part], reduction="sum").double()
    dist.all_reduce(total)
    # rounded: the plateau scheduler compares it, and the order of the sum depends on the number of ranks
    return round(total.item() / len(x), 4)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--rho", type=float, default=0.3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = KeywordNet()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    sam = SAM(model.parameters(), opt, rho=args.rho)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)
    callback = SaveCallback(args.out, args.save_every)

    step = 0
    if args.resume:
        ck = torch.load(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1], "all.pt"))
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"], options=OPTS)
        plateau.load_state_dict(ck["plateau"])
        step = ck["step"]

    while step < args.steps:
        x, y = clips(args.batch, step)
        x, y = x[rank::world], y[rank::world]
        loss = loss_sum(model, x, y, args.batch, world)
        loss.backward()
        norm = sam.ascend()
        loss_sum(model, x, y, args.batch, world).backward()
        sam.descend()
        step += 1
        if step % 2 == 0:
            plateau.step(validation_loss(model, rank, world))
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step:3d} loss {shown.item() / world:.5f} norm {norm:.5f} lr {opt.param_groups[0]['lr']:.5f}")
        callback(step, model, opt, plateau)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
