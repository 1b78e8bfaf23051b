import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from net import build, loss_parts
from sam import SAM


def crowd(n=64):
    """Images with 0 to 3 boxes, most of them empty."""
    g = torch.Generator().manual_seed(33)
    image = 0.3 * torch.randn(n, 1, 16, 16, generator=g)
    obj, size = torch.zeros(n, 4, 4), torch.zeros(n, 4, 4, 2)
    for i in range(n):
        for _ in range(max(0, int(torch.randint(-3, 4, (1,), generator=g)))):
            r, c, h, w = torch.randint(0, 4, (4,), generator=g).tolist()
            image[i, 0, 4 * r:4 * r + h + 1, 4 * c:4 * c + w + 1] = 2.0
            obj[i, r, c] = 1.0
            size[i, r, c] = torch.tensor([(h + 1) / 4, (w + 1) / 4])
    return image, obj, size


def save(path, net, opt, step):
    weights = {n: p.full_tensor() for n, p in net.state_dict().items()}
    momentum = {n: opt.state[p]["momentum_buffer"].full_tensor() for n, p in net.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "momentum": momentum, "step": step}, path)


def load(path, net, opt):
    blob = torch.load(path)
    for n, p in net.named_parameters():
        place = (p.device_mesh, p.placements)
        p.detach().copy_(distribute_tensor(blob["weights"][n], *place))
        opt.state[p]["momentum_buffer"] = distribute_tensor(blob["momentum"][n], *place)
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = build()
    base = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    sam = SAM(net, base, rho=0.1)
    image, obj, size = crowd()
    start = load(os.path.join(args.resume, "boxes.pt"), net, base) if args.resume else 0

    for step in range(start, args.steps):
        idx = torch.randperm(len(image), generator=torch.Generator().manual_seed(step))[:args.batch][rank::world]
        boxes_here = obj[idx].sum()
        boxes = boxes_here.clone()
        dist.all_reduce(boxes)
        boxes = boxes.clamp(min=1.0)

        def closure():
            o, b = loss_parts(net(image[idx]), obj[idx], size[idx])
            loss = world * (o / (args.batch * 16) + b / boxes)
            loss.backward()
            return loss.detach()

        first = closure()
        sam.climb()
        closure()
        sam.descend()
        if step % 4 == 0 or step == args.steps - 1:
            shown = first / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.5f} boxes here {int(boxes_here)} of {int(boxes)}", flush=True)
        if args.out and step + 1 == args.save_at:
            save(os.path.join(args.out, "boxes.pt"), net, base, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
