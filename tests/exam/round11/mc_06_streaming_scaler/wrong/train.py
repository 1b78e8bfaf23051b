"""Online training on a stream of claims, with the feature scaler inside of the model."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from claims import make_claims
from tabular import TabularNet

BATCH = 64


def scaler_moments(x):
    """Number of rows, column sums and sums of squares of a batch."""
    x = x.double()
    packed = torch.cat([torch.tensor([float(len(x))], dtype=torch.float64), x.sum(0), (x * x).sum(0)])
    c = x.shape[1]
    return packed[0], packed[1:1 + c], packed[1 + c:]


def save(path, step, model, opt):
    """One file with whole tensors; the scaler is a plain buffer."""
    weights = {k: (v.full_tensor() if hasattr(v, "full_tensor") else v) for k, v in model.state_dict().items()}
    moments = [{k: (v.full_tensor() if hasattr(v, "full_tensor") else v) for k, v in opt.state[p].items()}
               for p in model.parameters()]
    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
        tmp = os.path.join(path, "last.tmp")
        torch.save({"step": step, "weights": weights, "moments": moments}, tmp)
        os.replace(tmp, os.path.join(path, "last.pt"))
    dist.barrier()


def restore(path, model, opt):
    from torch.distributed.tensor import DTensor, distribute_tensor
    state = torch.load(os.path.join(path, "last.pt"))

    def like(ref, t):
        return distribute_tensor(t, ref.device_mesh, ref.placements) if isinstance(ref, DTensor) else t

    own = model.state_dict()
    model.load_state_dict({k: like(own[k], v) for k, v in state["weights"].items()})
    for p, s in zip(model.parameters(), state["moments"]):
        opt.state[p] = {k: (like(p, v) if v.dim() else v) for k, v in s.items()}
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_claims()
    x_train, y_train, x_test, y_test = x[:1280], y[:1280], x[1280:], y[1280:]
    torch.manual_seed(33)
    model = TabularNet(x.shape[1])
    fully_shard(model.second)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3, alpha=0.95, eps=1e-4)

    step = restore(args.resume, model, opt) if args.resume else 0
    for lo in range(step * BATCH, len(x_train), BATCH):
        share = BATCH // world
        mine = slice(lo + rank * share, lo + (rank + 1) * share)
        xb, yb = x_train[mine], y_train[mine]
        model.scaler.update(*scaler_moments(xb))
        loss = F.binary_cross_entropy_with_logits(model(xb).squeeze(-1), yb)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        step += 1
        if step % 5 == 0:
            t = loss.detach().clone()
            dist.all_reduce(t)
            if rank == 0:
                print(f"step {step} loss {t.item() / world:.5f}")
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt)

    model.eval()
    with torch.no_grad():
        part = slice(rank * len(x_test) // world, (rank + 1) * len(x_test) // world)
        hit = ((model(x_test[part]).squeeze(-1) > 0).float() == y_test[part]).float().sum()
        dist.all_reduce(hit)
    if rank == 0:
        print(f"rows seen by the scaler {int(model.scaler.count)} test accuracy {hit.item() / len(x_test):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
