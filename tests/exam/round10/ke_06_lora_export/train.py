import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lora import add_lora, merge, restore
from model import Encoder


def export_merged(model, path=None):
    """The model as a plain encoder, adapters folded in, with every parameter gathered on rank 0."""
    base = merge(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    full = {k: v.clone() for k, v in full.items() if "lora_" not in k}
    restore(model, base)
    if path and dist.get_rank() == 0:
        torch.save(full, path)
    return full


def batch(step, size, rank, world):
    g = torch.Generator().manual_seed(31 * step + 5)
    ids = torch.randint(0, 30, (size, 16), generator=g)
    y = ((ids < 8).sum(1) > 4).long() + ((ids > 22).sum(1) > 4).long()
    n = size // world
    return ids[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def trainable(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def save(root, step, model, optim):
    root = pathlib.Path(root) / f"{step:04d}"
    root.mkdir(parents=True, exist_ok=True)
    moments = {
        n: {k: local(v) for k, v in optim.state[p].items()} for n, p in trainable(model).items() if p in optim.state
    }
    state = {"params": {n: local(p.detach()) for n, p in model.named_parameters()}, "moments": moments, "step": step}
    torch.save(state, root / f"rank{dist.get_rank()}.pt")
    dist.barrier()


def load(root, model, optim):
    newest = sorted(p for p in pathlib.Path(root).iterdir() if p.is_dir())[-1]
    state = torch.load(newest / f"rank{dist.get_rank()}.pt")
    with torch.no_grad():
        for n, p in model.named_parameters():
            local(p).copy_(state["params"][n])
    for n, p in trainable(model).items():
        entry = {}
        for k, v in state["moments"][n].items():
            wrap = isinstance(p, DTensor) and k != "step"
            entry[k] = (
                DTensor.from_local(v, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()) if wrap else v
            )
        optim.state[p] = entry
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--preview-every", type=int, default=10, help="write a merged preview model this often")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(17)
    model = add_lora(Encoder(), {"q", "v", "up", "down"})
    for n, p in model.named_parameters():
        p.requires_grad_("lora_" in n or n.startswith("cls."))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, eps=1e-6)

    start = load(args.resume, model, optim) if args.resume else 0
    for step in range(start + 1, args.steps + 1):
        ids, y = batch(step, 32, rank, world)
        loss = F.cross_entropy(model(ids), y)
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % args.preview_every == 0:
            preview = export_merged(model)
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                size = sum(v.norm().item() ** 2 for v in preview.values()) ** 0.5
                print(f"step {step} loss {value.item() / world:.4f} merged norm {size:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, optim)

    if args.export:
        export_merged(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
