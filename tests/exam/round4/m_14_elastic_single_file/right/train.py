import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import elastic
from stream import Stream


class MoE(nn.Module):
    """Two experts, densely mixed."""

    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Linear(dim, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim)) for _ in range(2))

    def forward(self, x):
        g = self.gate(x).softmax(-1)
        return x + sum(g[:, i:i + 1] * e(x) for i, e in enumerate(self.experts))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(9, 18), MoE(18), MoE(18), nn.Linear(18, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95, momentum=0.5, eps=1e-4)

    step, samples = elastic.load(args.resume, model, opt) if args.resume else (0, 0)
    stream = Stream(samples)
    for step in range(step + 1, (args.stop_at or args.steps) + 1):
        x, y = stream.next(args.batch, rank, world)
        loss = nn.functional.huber_loss(model(x), y, reduction="sum") / (args.batch * 3)
        (loss * world).backward()  # FSDP divides by the number of ranks
        opt.step()
        opt.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{step} samples {stream.samples} loss {total.item():.5f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            elastic.save(args.out, step, stream.samples, model, opt)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
