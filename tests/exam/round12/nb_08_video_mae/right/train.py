import argparse

import torch
import torch.distributed as dist

import checkpoint
from curriculum import MaskCurriculum
from model import FRAMES, SIDE, TOKENS, build, to_tokens


def clips(n, seed=70):
    """Soft blobs drifting over the frames."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(SIDE).float(), torch.arange(SIDE).float(), indexing="ij")
    start = SIDE * torch.rand(n, 1, 2, generator=g)
    speed = 2 * torch.rand(n, 1, 2, generator=g) - 1
    pos = start + speed * torch.arange(FRAMES).view(1, FRAMES, 1)
    d = (yy - pos[..., :1, None]) ** 2 + (xx - pos[..., 1:, None]) ** 2
    return 2 * torch.exp(-d / 8) + 0.05 * torch.randn(n, FRAMES, SIDE, SIDE, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build(seed=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)
    curriculum = MaskCurriculum()
    tokens = to_tokens(clips(96))
    step = checkpoint.load(args.resume, model, optimizer, curriculum) if args.resume else 0

    while step < args.steps:
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(len(tokens), (args.batch,), generator=g)
        rank_of = torch.rand(args.batch, TOKENS, generator=g).argsort(1).argsort(1)
        hide = rank_of < curriculum.hidden(TOKENS)
        loss = model(tokens[idx][rank::world], hide[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean = loss.detach() / world
        dist.all_reduce(mean)
        curriculum.observe(mean.item())
        step += 1
        if rank == 0 and (step == 1 or step % 8 == 0):
            print(f"step {step} loss {mean.item():.5f} hidden {curriculum.ratio:.2f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            checkpoint.save(args.out, model, optimizer, curriculum, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
