"""Image classification with SAM and global batch normalisation. Each sample's augmentation is seeded by its index and the epoch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from sam import SAM
from syncnorm import GlobalBatchNorm

BATCH, EPOCHS, TRAIN, TEST = 32, 4, 144, 96


class Stage(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.norm = GlobalBatchNorm(cout)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stages = nn.Sequential(Stage(1, 12, 1), Stage(12, 20, 2), Stage(20, 28, 2))
        self.head = nn.Linear(28, classes)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


def make_images(n, seed):
    proto = torch.randn(5, 1, 10, 10, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=g)
    return proto[y] + 0.8 * torch.randn(n, 1, 10, 10, generator=g), y


def augment(x, index, epoch):
    out = []
    for image, i in zip(x, index.tolist()):
        g = torch.Generator().manual_seed(epoch * 1_000_003 + i)
        shift = torch.randint(-1, 2, (2,), generator=g).tolist()
        out.append(torch.roll(image, shift, (1, 2)) + 0.1 * torch.randn(image.shape, generator=g))
    return torch.stack(out)


def batches(epoch):
    """Global batches of indices; the remainder that does not fill a batch is left for another epoch's order."""
    order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
    return order[:TRAIN // BATCH * BATCH].split(BATCH)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = Net()
    for stage in net.stages:
        fully_shard(stage)
    fully_shard(net)
    base = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(base, max_lr=0.1, total_steps=EPOCHS * (TRAIN // BATCH), cycle_momentum=True)
    sam = SAM(net.parameters(), base, rho=0.05)
    norms = [m for m in net.modules() if isinstance(m, GlobalBatchNorm)]
    (x, y), (tx, ty) = make_images(TRAIN, 1), make_images(TEST, 2)

    epoch, position, step = 0, 0, 0
    if args.resume:
        last = max(int(name[4:]) for name in os.listdir(args.resume))
        s = torch.load(os.path.join(args.resume, f"step{last}", f"{rank}.pt"), weights_only=False)
        net.load_state_dict(s["net"])
        base.load_state_dict(s["base"])
        sched.load_state_dict(s["sched"])
        epoch, position, step = s["at"]

    while epoch < EPOCHS:
        net.train()
        todo = batches(epoch)
        while position < len(todo):
            index = todo[position].tensor_split(world)[rank]
            bx, by = augment(x[index], index, epoch), y[index]
            loss = F.cross_entropy(net(bx), by)
            loss.backward()
            sam.climb()
            for m in norms:
                m.track = False
            F.cross_entropy(net(bx), by).backward()
            for m in norms:
                m.track = True
            sam.descend()
            sched.step()
            position, step = position + 1, step + 1
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0 and step % 4 == 0:
                print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
            if args.save_every and step % args.save_every == 0:
                folder = os.path.join(args.out, f"step{step}")
                os.makedirs(folder, exist_ok=True)
                torch.save({"net": net.state_dict(), "base": base.state_dict(), "sched": sched.state_dict(),
                            "at": (epoch, position, step)}, os.path.join(folder, f"{rank}.pt"))
                dist.barrier()
        epoch, position = epoch + 1, 0

        net.eval()
        with torch.no_grad():
            part = torch.arange(TEST).tensor_split(world)[rank]
            right = (net(tx[part]).argmax(1) == ty[part]).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch} test accuracy {right.item() / TEST:.4f}", flush=True)

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in net.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
