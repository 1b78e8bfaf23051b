"""CLIP with gradient caching: the contrastive loss sees the large batch, the towers only ever small chunks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from towers import Clip

VOCAB, LENGTH = 30, 6


def make_pairs(n, seed=0):
    """A patch of a colour in a quadrant, and a caption naming both with filler words."""
    g = torch.Generator().manual_seed(seed)
    colour, place = torch.randint(6, (n,), generator=g), torch.randint(4, (n,), generator=g)
    palette = torch.randn(6, 3, generator=torch.Generator().manual_seed(99))
    x = 0.2 * torch.randn(n, 3, 12, 12, generator=g)
    ids = torch.randint(10, VOCAB, (n, LENGTH), generator=g)
    for i in range(n):
        r, c = divmod(int(place[i]), 2)
        x[i, :, r * 6:r * 6 + 6, c * 6:c * 6 + 6] += palette[colour[i]][:, None, None]
        a, b = torch.randperm(LENGTH, generator=g)[:2].tolist()
        ids[i, a], ids[i, b] = colour[i], 6 + place[i]
    return x, ids


def all_rows(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


class GradCacheStep:
    def __init__(self, model, log_scale, chunk):
        self.model, self.log_scale, self.chunk = model, log_scale, chunk

    def __call__(self, x, ids):
        """Leaves the gradient of the loss over the whole batch at the weights; x and ids are the rows of this rank."""
        world, rank = dist.get_world_size(), dist.get_rank()
        chunks = list(zip(x.split(self.chunk), ids.split(self.chunk)))
        with torch.no_grad():
            outs = [self.model(a, b) for a, b in chunks]
        image = all_rows(torch.cat([o[0] for o in outs])).requires_grad_(True)
        text = all_rows(torch.cat([o[1] for o in outs])).requires_grad_(True)

        # every rank computes the loss of the whole batch, so the gradient of the scale is already complete
        logits = self.log_scale.exp() * image @ text.t()
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        loss.backward()
        grad_image, grad_text = (t.grad.chunk(world)[rank].split(self.chunk) for t in (image, text))

        for i, (a, b) in enumerate(chunks):
            self.model.set_requires_gradient_sync(i + 1 == len(chunks))
            zi, zt = self.model(a, b)
            surrogate = (zi * grad_image[i]).sum() + (zt * grad_text[i]).sum()
            # the average over the ranks has to become a sum
            (surrogate * world).backward()
        return loss.detach()


@torch.no_grad()
def retrieval(model, x, ids):
    """Share of images whose own caption is among the three nearest ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    zi, zt = model(x.chunk(world)[rank], ids.chunk(world)[rank])
    sim = zi @ all_rows(zt).t()
    own = torch.arange(len(zi)) + rank * len(zi)
    hits = (sim.topk(3, dim=1).indices == own[:, None]).any(1).sum()
    dist.all_reduce(hits)
    return hits.item() / len(x)


def save(folder, step, model, optimizers, log_scale, order):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"model": get_model_state_dict(model, options=options),
             "towers": get_optimizer_state_dict(model, optimizers["towers"], options=options),
             "scale": optimizers["scale"].state_dict(), "log_scale": log_scale.detach(), "order": order.get_state(), "step": step}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "tmp.pt")
        torch.save(state, tmp)
        os.replace(tmp, os.path.join(folder, f"clip_{step:04d}.pt"))
    dist.barrier()


def load(folder, model, optimizers, log_scale, order):
    newest = sorted(f for f in os.listdir(folder) if f.startswith("clip_"))[-1]
    # only rank 0 reads the file, the rest comes by broadcast
    small = [None]
    state = {"model": {}, "towers": {}}
    if dist.get_rank() == 0:
        state = torch.load(os.path.join(folder, newest))
        small = [{k: state[k] for k in ("scale", "log_scale", "order", "step")}]
    dist.broadcast_object_list(small)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizers["towers"], state["towers"], options=options)
    optimizers["scale"].load_state_dict(small[0]["scale"])
    with torch.no_grad():
        log_scale.copy_(small[0]["log_scale"])
    order.set_state(small[0]["order"])
    return small[0]["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--chunk", type=int, default=6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--folder", default="clip")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(10)
    model = Clip(VOCAB)
    fully_shard(model.image)
    fully_shard(model.text)
    fully_shard(model, reshard_after_forward=True)
    # the temperature is one number: replicated, outside of the sharded model
    log_scale = torch.nn.Parameter(torch.tensor(1.5))
    optimizers = {"towers": torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01),
                  "scale": torch.optim.SGD([log_scale], lr=0.05, momentum=0.9)}
    order = torch.Generator().manual_seed(3)
    start = load(args.folder, model, optimizers, log_scale, order) if args.resume else 0
    x, ids = make_pairs(300)
    held_out = make_pairs(48, seed=1)
    cached_step = GradCacheStep(model, log_scale, args.chunk)

    for step in range(start + 1, args.steps + 1):
        rows = torch.randperm(len(x), generator=order)[: args.batch].chunk(world)[rank]
        loss = cached_step(x[rows], ids[rows])
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            log_scale.clamp_(max=4.6)
        if step % 4 == 0:
            top3 = retrieval(model, *held_out)
            if rank == 0:
                print(f"step {step} loss {loss.item():.5f} scale {log_scale.exp().item():.4f} top-3 {top3:.3f}")
        if args.save_every and step % args.save_every == 0:
            save(args.folder, step, model, optimizers, log_scale, order)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
