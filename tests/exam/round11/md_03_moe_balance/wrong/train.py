"""A small MoE language model with loss-free load balancing."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from moe import MoELM


def corpus(vocab=32, length=4096, seed=9):
    """Two dialects: a token is followed by a dialect-dependent successor, with some noise."""
    g = torch.Generator().manual_seed(seed)
    succ = torch.stack([torch.randperm(vocab, generator=g) for _ in range(2)])
    ids, dialect = [0], 0
    for i in range(length - 1):
        if i % 128 == 0:
            dialect = int(torch.randint(2, (), generator=g))
        noisy = torch.rand((), generator=g) < 0.15
        ids.append(int(torch.randint(vocab, (), generator=g)) if noisy else int(succ[dialect, ids[-1]]))
    return torch.tensor(ids)


def global_batch(text, step, rows, seq):
    g = torch.Generator().manual_seed(1000 + step)
    at = torch.randint(len(text) - seq - 1, (rows,), generator=g)
    window = text[at[:, None] + torch.arange(seq + 1)]
    return window[:, :-1], window[:, 1:]


def lr_factor(step, warmup=4, total=60):
    return min(1.0, (step + 1) / warmup) * (1 - step / total)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--seq", type=int, default=12)
    ap.add_argument("--bias-rate", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path, default=Path("checkpoints"))
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = MoELM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_factor)
    text = corpus()

    first = 0
    if args.resume:
        newest = sorted(args.resume.glob("step-*"))[-1]
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=str(newest))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        first = state["step"]

    for step in range(first, args.steps):
        x, y = global_batch(text, step, args.rows, args.seq)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        for moe in model.moe_layers():
            moe.update_bias(args.bias_rate)

        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {mean / world:.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "optim": osd, "sched": sched.state_dict(), "step": step + 1},
                     checkpoint_id=str(args.out / f"step-{step + 1:05d}"))

    if rank == 0:
        print("route bias", [[round(v, 3) for v in m.route_bias.tolist()] for m in model.moe_layers()])
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
