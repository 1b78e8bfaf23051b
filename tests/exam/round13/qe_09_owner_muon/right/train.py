import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import store
from model import TinyLM
from optim import OwnerMuon

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--out")
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--resume")


def batch_of(step, size, vocab=29, length=16):
    g = torch.Generator().manual_seed(100 + step)
    start = torch.randint(0, vocab, (size, 1), generator=g)
    stride = torch.randint(1, 4, (size, 1), generator=g)
    ids = (start + stride * torch.arange(length + 1)) % vocab
    share = size // dist.get_world_size()
    return ids[dist.get_rank() * share :][:share]


def main(args):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    model = TinyLM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    names = {p: n for n, p in model.named_parameters()}
    matrices = [p for p, n in names.items() if n.startswith("blocks.") and p.ndim == 2]
    rest = [p for p in names if not any(p is m for m in matrices)]
    muon = OwnerMuon(matrices, mesh, lr=0.02)
    adam = torch.optim.AdamW(rest, lr=4e-3, weight_decay=0.0, eps=1e-6)

    step = store.load(args.resume, model, adam, muon, names) if args.resume else 0
    while step < args.steps:
        ids = batch_of(step, args.batch)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for opt in (muon, adam):
            opt.step()
            opt.zero_grad()
        step += 1
        if step % 6 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"{step:4d}  {mean.item():.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            store.save(args.out, step, model, adam, muon, names)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
