import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gather import gather_rows
from towers import build


def pairs(batch, start_step, rank, world):
    """Endless global batches of matching (image, caption) pairs; yields the rows of this rank."""
    proto = torch.randn(30, 8, 8, generator=torch.Generator().manual_seed(100))
    step = start_step
    while True:
        g = torch.Generator().manual_seed(step + 1)
        ids = torch.randint(30, (batch, 5), generator=g)
        images = proto[ids].mean(1).unsqueeze(1) + 0.1 * torch.randn(batch, 1, 8, 8, generator=g)
        yield images.chunk(world)[rank], ids.chunk(world)[rank]
        step += 1


def contrastive_loss(a, b, scale):
    """Each rank scores its own rows against the rows of all ranks, in both directions."""
    labels = torch.arange(len(a)) + dist.get_rank() * len(a)
    image_to_text = F.cross_entropy(scale * a @ gather_rows(b).T, labels)
    text_to_image = F.cross_entropy(scale * b @ gather_rows(a).T, labels)
    return (image_to_text + text_to_image) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(seed=0)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=3e-3)

    step = 0
    if args.resume:
        model_sd, optim_sd = get_state_dict(model, optimizer)
        state = {"model": model_sd, "optim": optim_sd, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    batches = pairs(args.batch, step, rank, world)
    while step < args.steps:
        images, ids = next(batches)
        # the loss of a rank is the mean over its rows; fully_shard takes the mean over ranks, and the
        # gathered rows bring back the gradients of the other ranks' losses through GatherRows
        loss = contrastive_loss(*model(images, ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            model_sd, optim_sd = get_state_dict(model, optimizer)
            state = {"model": model_sd, "optim": optim_sd, "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"{step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
