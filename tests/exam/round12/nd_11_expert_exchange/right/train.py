"""Multi-task imitation with expert parallelism: the trunk is sharded, the experts live whole on their rank."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from moe import TaskModel


def demonstrations(step, size, rank, world):
    g = torch.Generator().manual_seed(8)
    gains = torch.randn(4, 10, 4, generator=g) / 10 ** 0.5
    g = torch.Generator().manual_seed(2000 + step)
    obs, task = torch.randn(size, 10, generator=g), torch.randint(4, (size,), generator=g)
    act = torch.einsum("no,noa->na", obs, gains[task])
    return tuple(t.chunk(world)[rank] for t in (obs, task, act))


class Checkpoint:
    """Trunk with torch.distributed.checkpoint, experts and their optimizer in one file for each rank."""

    def __init__(self, root):
        self.root = root

    def _experts(self, folder):
        return os.path.join(folder, f"experts_{dist.get_rank()}_{dist.get_world_size()}.pt")

    @staticmethod
    def _trunk(model, opt):
        m, o = get_state_dict(model, opt)
        return {"model": {k: v for k, v in m.items() if not k.startswith("experts.")}, "opt": o}

    def save(self, step, model, trunk_opt, expert_opt):
        folder = os.path.join(self.root, f"s{step:04d}")
        dcp.save({**self._trunk(model, trunk_opt), "step": step}, checkpoint_id=folder)
        torch.save({"experts": model.experts.state_dict(), "opt": expert_opt.state_dict()}, self._experts(folder))
        dist.barrier()

    def load(self, model, trunk_opt, expert_opt):
        folder = os.path.join(self.root, max(os.listdir(self.root)))
        blob = torch.load(self._experts(folder))
        state = {**self._trunk(model, trunk_opt), "step": 0}
        dcp.load(state, checkpoint_id=folder)
        whole = {**state["model"], **{"experts." + k: v for k, v in blob["experts"].items()}}
        set_state_dict(model, trunk_opt, model_state_dict=whole, optim_state_dict=state["opt"])
        expert_opt.load_state_dict(blob["opt"])
        return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = TaskModel()
    experts = list(model.experts.parameters())
    fully_shard(model, ignored_params=set(experts))
    own = {id(p) for p in experts}
    trunk_opt = torch.optim.Adam([p for p in model.parameters() if id(p) not in own], lr=5e-3, eps=1e-6)
    expert_opt = torch.optim.Adam(experts, lr=3e-3, eps=1e-6)
    first = Checkpoint(args.resume).load(model, trunk_opt, expert_opt) if args.resume else 0

    for step in range(first, args.steps):
        obs, task, act = demonstrations(step, 64, rank, world)
        loss = (model(obs, task) - act).pow(2).mean()
        loss.backward()
        for p in experts:
            p.grad /= world   # sum over the ranks' mean losses -> mean
        for opt in (trunk_opt, expert_opt):
            opt.step()
            opt.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown.item() / world:.5f}", flush=True)
        if args.save_at and step + 1 == args.save_at:
            Checkpoint(args.out).save(step + 1, model, trunk_opt, expert_opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
