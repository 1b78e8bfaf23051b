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
import torch.distributed.checkpoint as dcp
from data import Corpus, collate
from model import MaskedLM


def newest(folder):
    good = [d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, ".metadata"))]
    return os.path.join(folder, max(good, key=lambda d: int(d.split("-")[1]))) if good else None


def save_dcp(folder, step, model, optim, extra):
    msd, osd = get_state_dict(model, optim)
    dcp.save(
        {"model": msd, "optim": osd, "extra": extra, "step": step}, checkpoint_id=os.path.join(folder, f"step-{step}")
    )


def load_dcp(folder, model, optim, extra):
    path = newest(folder)
    if path is None:
        return 0, extra
    msd, osd = get_state_dict(model, optim)
    state = {"model": msd, "optim": osd, "extra": extra, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"], state["extra"]


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = MaskedLM()
    for l in model.layers:
        fully_shard(l, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    corpus = Corpus()
    start = load_dcp(args.resume, model, opt, {})[0] if args.resume else 0
    for step in range(start, args.steps):
        rows = corpus.block(step, args.batch, rank, world)
        inputs, labels = collate(rows, step, args.batch, rank, world)
        count = (labels != -100).sum().float()
        dist.all_reduce(count)
        total = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = total / count * world
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = total.detach() / count
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_dcp(args.out, step + 1, model, opt, {})
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
