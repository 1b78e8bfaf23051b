import argparse
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from contrast import CachedStep, all_rows
from towers import Tower, visits


class Parts:
    """Model and optimizer of each tower under its own name, for torch.distributed.checkpoint."""

    def __init__(self, **pairs):
        self.pairs = pairs

    def state_dict(self):
        return {n: {"model": get_model_state_dict(m), "optim": get_optimizer_state_dict(m, o)} for n, (m, o) in self.pairs.items()}

    def load_state_dict(self, state):
        for n, (m, o) in self.pairs.items():
            set_model_state_dict(m, state[n]["model"])
            set_optimizer_state_dict(m, o, state[n]["optim"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--micro", type=int, default=8)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    user_tower, item_tower = fully_shard(Tower(10)), fully_shard(Tower(8))
    optims = [torch.optim.SGD(user_tower.parameters(), lr=0.3, momentum=0.8),
              torch.optim.SGD(item_tower.parameters(), lr=0.2, momentum=0.8)]
    parts = Parts(user=(user_tower, optims[0]), item=(item_tower, optims[1]))
    train_step = CachedStep(user_tower, item_tower, args.micro)
    users, items = visits(1024, seed=100)
    held_user, held_item = (t.chunk(world)[rank] for t in visits(128, seed=101))

    step = 0
    if args.resume:
        state = {"towers": parts.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        parts.load_state_dict(state["towers"])
        step = state["step"]
    while step < args.steps:
        rows = torch.randperm(1024, generator=torch.Generator().manual_seed(step))[:args.batch].chunk(world)[rank]
        loss = train_step(users[rows], items[rows])
        for o in optims:
            o.step()
            o.zero_grad()
        step += 1
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            dcp.save({"towers": parts.state_dict(), "step": step}, checkpoint_id=args.out)
    with torch.no_grad():
        u, i = all_rows(user_tower(held_user)), all_rows(item_tower(held_item))
    place = ((u @ i.t()).argsort(1, descending=True) == torch.arange(len(u))[:, None]).float().argmax(1)
    if rank == 0:
        print(f"recall@10 {(place < 10).float().mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
