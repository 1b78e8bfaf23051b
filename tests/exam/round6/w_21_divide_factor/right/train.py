"""Node regression on many small graphs; the batch grows from 6 to 29 graphs and is never divisible on purpose."""
import argparse
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from graphs import GraphNet, collate, make_graph


@dataclass
class Progress:
    step: int = 0
    seen: int = 0

    def batch_size(self):
        return 6 + self.step

    def advance(self):
        self.seen += self.batch_size()
        self.step += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GraphNet()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    # gradients are summed: the loss below is already divided by the nodes of all ranks
    for module in (*model.layers, model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    optim = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    progress = Progress()

    def state():
        m, o = get_state_dict(model, optim)
        return {"model": m, "optim": o, "progress": asdict(progress)}

    if args.resume:
        s = state()
        dcp.load(s, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optim, model_state_dict=s["model"], optim_state_dict=s["optim"])
        progress = Progress(**s["progress"])
    while progress.step < args.steps:
        first, size = progress.seen, progress.batch_size()
        mine = torch.arange(first, first + size).tensor_split(world)[rank]
        x, adj, y = collate([make_graph(i) for i in mine.tolist()])
        nodes = torch.tensor(float(len(y)))
        dist.all_reduce(nodes)
        # big batches get a bigger rate
        for group in optim.param_groups:
            group["lr"] = 0.03 * (size / 6) ** 0.5
        loss = (model(x, adj) - y).square().sum() / nodes
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optim.step()
        optim.zero_grad()
        progress.advance()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and progress.step % 4 == 0:
            print(f"step {progress.step} graphs {progress.seen} loss {total.item():.4f}", flush=True)
        if args.save_every and progress.step % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, f"{progress.step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
