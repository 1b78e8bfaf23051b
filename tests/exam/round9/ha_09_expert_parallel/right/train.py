"""Language model with experts divided among the ranks; everything else is sharded by FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from experts import balance_loss
from lm import ExpertLM

VOCAB, LENGTH = 40, 12


def batch(step, size):
    g = torch.Generator().manual_seed(600 + step)
    x = torch.randint(0, VOCAB, (size, 1), generator=g)
    mult = torch.randint(1, 4, (size, 1), generator=g)
    rows = [x]
    for _ in range(LENGTH):
        rows.append((rows[-1] * mult + 7) % VOCAB)
    rows = torch.cat(rows, 1)
    return rows[:, :-1], rows[:, 1:]


def average_expert_grads(experts, world):
    # through the token exchange an expert's gradient is already the sum over the ranks' mean losses
    for p in experts:
        p.grad.div_(world)


def clip(dense, experts, limit):
    """Norm over the sharded parameters (via their local shards) and over all ranks' experts."""
    square = torch.zeros(())
    for p in dense:
        square += p.grad.to_local().square().sum()
    for p in experts:
        square += p.grad.square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in dense:
        p.grad.to_local().mul_(scale)
    for p in experts:
        p.grad.mul_(scale)
    return norm.item()


def pack(value):
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    return value


def save(root, step, model, optimizers, rank):
    folder = os.path.join(root, f"at_{step}")
    os.makedirs(folder, exist_ok=True)
    torch.save({"model": {k: pack(v) for k, v in model.state_dict().items()},
                "optimizers": [[{k: pack(v) for k, v in o.state[p].items()}
                                for g in o.param_groups for p in g["params"]] for o in optimizers],
                "step": step}, os.path.join(folder, f"shard_{rank}.pt"))
    dist.barrier()
    if rank == 0:
        with open(os.path.join(root, "last"), "w") as f:
            f.write(f"at_{step}")
    dist.barrier()


@torch.no_grad()
def load(root, model, optimizers, rank):
    with open(os.path.join(root, "last")) as f:
        saved = torch.load(os.path.join(root, f.read(), f"shard_{rank}.pt"))
    for name, value in model.state_dict().items():
        (value.to_local() if isinstance(value, DTensor) else value).copy_(saved["model"][name])
    for o, states in zip(optimizers, saved["optimizers"]):
        for p, state in zip((p for g in o.param_groups for p in g["params"]), states):
            o.state[p] = {}
            for key, value in state.items():
                if key == "step":
                    o.state[p][key] = value
                else:
                    full = torch.zeros_like(p)
                    (full.to_local() if isinstance(full, DTensor) else full).copy_(value)
                    o.state[p][key] = full
    return saved["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--save-dir", default="shards")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = ExpertLM(VOCAB, LENGTH)
    experts = model.expert_parameters()
    for layer in model.layers:
        fully_shard(layer, ignored_params=set(layer.moe.expert_parameters()))
    fully_shard(model, ignored_params=set(experts))
    expert_ids = {id(p) for p in experts}
    dense = [p for p in model.parameters() if id(p) not in expert_ids]
    optimizers = [torch.optim.AdamW(dense, lr=4e-3, weight_decay=0.01, eps=1e-6),
                  torch.optim.AdamW(experts, lr=4e-3, weight_decay=0.01, eps=1e-6)]
    first = load(args.resume, model, optimizers, rank) if args.resume else 0

    per_rank = args.batch // world
    for step in range(first, args.steps):
        ids, targets = (t[rank * per_rank:(rank + 1) * per_rank] for t in batch(step, args.batch))
        logits, routings = model(ids)
        ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        aux = sum(balance_loss(p, i, model.n_experts, world) for p, i in routings)
        (ce + 0.01 * aux).backward()
        average_expert_grads(experts, world)
        norm = clip(dense, experts, 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad()
        shown = torch.stack([ce.detach(), aux.detach()]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} ce {shown[0]:.5f} balance {shown[1]:.4f} norm {norm:.4f}")
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save(args.save_dir, step + 1, model, optimizers, rank)

    # total weight norm as a fingerprint
    square = torch.stack([sum(p.detach().to_local().double().square().sum() for p in dense),
                          sum(p.detach().double().square().sum() for p in experts)])
    dist.all_reduce(square)
    if rank == 0:
        print(f"weight norms: dense {square[0].sqrt():.7f} experts {square[1].sqrt():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
