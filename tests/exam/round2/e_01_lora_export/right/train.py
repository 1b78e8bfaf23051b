import argparse, os, math
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
    get_model_state_dict,
)
from model import Decoder
from lora import add_lora
from merge import merge_lora

R, ALPHA = 4, 16


def save_checkpoint(out, step, model, optim, extra=None):
    msd, osd = get_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(out, exist_ok=True)
        tmp = os.path.join(out, f"tmp_{step}.part")
        torch.save({"step": step, "model": msd, "optim": osd, "extra": extra or {}}, tmp)
        os.replace(tmp, os.path.join(out, f"step_{step:06d}.pt"))
    dist.barrier()


def load_checkpoint(folder, model, optim):
    files = sorted(f for f in os.listdir(folder) if f.startswith("step_") and f.endswith(".pt"))
    if not files:
        return 0, {}
    ck = torch.load(os.path.join(folder, files[-1]), map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        optim,
        model_state_dict=ck["model"],
        optim_state_dict=ck["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck["step"], ck["extra"]


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


def batch_for(step, n, rank, world):
    g = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, 24, (n, 1), generator=g)
    seq = (start + 3 * torch.arange(13)) % 24
    return seq[rank::world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = add_lora(Decoder(), r=R, alpha=ALPHA)
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)
    start = load_checkpoint(args.resume, model, opt)[0] if args.resume else 0
    for step in range(start, args.steps):
        seq = batch_for(step, args.batch, rank, world)
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        merged = merge_lora(full, ALPHA / R)
        torch.save(merged, args.export or "merged.pt")
        print("wrote merged model", len(merged), "tensors", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
