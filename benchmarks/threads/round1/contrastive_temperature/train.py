"""Two-tower contrastive training (CLIP style) with FSDP2 towers and a learned temperature."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distF
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Tower(nn.Module):
    def __init__(self, inp, dim=32, depth=2):
        super().__init__()
        self.stem = nn.Linear(inp, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )
        self.proj = nn.Linear(dim, 16, bias=False)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return F.normalize(self.proj(h), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Tower(24)
        self.text = Tower(12)
        self.logit_scale = nn.Parameter(torch.full((2,), 2.0))  # one per direction

    def forward(self, image, text):
        return self.image(image), self.text(text), self.logit_scale.exp()


def gather(x):
    """Embeddings of all ranks, in rank order, with gradients."""
    return torch.cat(distF.all_gather(x)) if dist.get_world_size() > 1 else x


def contrastive_loss(img, txt, scale, rank):
    # every rank scores its own rows against the whole batch
    all_img, all_txt = gather(img), gather(txt)
    target = torch.arange(img.size(0), device=img.device) + rank * img.size(0)
    return 0.5 * (
        F.cross_entropy(scale[0] * img @ all_txt.T, target) + F.cross_entropy(scale[1] * txt @ all_img.T, target)
    )


def pairs(step, batch, mix):
    g = torch.Generator().manual_seed(500 + step)
    z = torch.randn(batch, 8, generator=g)
    image = torch.tanh(z @ mix[:, :24]) + 0.1 * torch.randn(batch, 24, generator=g)
    text = torch.tanh(z @ mix[:, 24:]) + 0.1 * torch.randn(batch, 12, generator=g)
    return image, text


def clip_grad_norm_(parameters, max_norm):
    """Clip the gradients of all given parameters together by their total norm."""
    parameters = [p for p in parameters if p.grad is not None]
    sharded = [p for p in parameters if isinstance(p.grad, DTensor)]
    plain = [p for p in parameters if not isinstance(p.grad, DTensor)]
    norms = []
    if sharded:
        norms.append(nn.utils.get_total_norm([p.grad for p in sharded]).full_tensor())
    if plain:
        norms.append(nn.utils.get_total_norm([p.grad for p in plain]))
    total = torch.linalg.vector_norm(torch.stack(norms))
    nn.utils.clip_grads_with_norm_(sharded, max_norm, total)
    nn.utils.clip_grads_with_norm_(plain, max_norm, total)
    return total


@torch.no_grad()
def retrieval(model, mix, device):
    image, text = pairs(10**6, 32, mix)
    img, txt, _ = model(image.to(device), text.to(device))
    return (img @ txt.T).argmax(1).eq(torch.arange(32, device=device)).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--max-norm", type=float, default=0.5)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(77)
    mix = torch.randn(8, 36)
    model = TwoTower().to(device)
    for tower in (model.image, model.text):
        for block in tower.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(tower, mesh=mesh)
    # not worth sharding: logit_scale stays a replicated tensor on every rank
    fully_shard(model, mesh=mesh, ignored_params={model.logit_scale})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, foreach=False)

    b = args.batch // world
    for step in range(args.steps):
        image, text = (t[rank * b : (rank + 1) * b].to(device) for t in pairs(step, args.batch, mix))
        loss = contrastive_loss(*model(image, text), rank)
        loss.backward()
        dist.all_reduce(model.logit_scale.grad)
        model.logit_scale.grad.div_(world)
        norm = clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} norm {norm.item():.5f} scale {model.logit_scale.exp().mean().item():.5f}", flush=True)

    top1 = retrieval(model, mix, device)
    if rank == 0:
        print(f"retrieval@1 {top1:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
