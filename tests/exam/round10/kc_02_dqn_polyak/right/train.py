"""Double DQN on logged data with FSDP2."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from mdp import transition_log
from target import PolyakTarget


class DuelingQ(nn.Module):
    def __init__(self, obs=3, width=48, actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.adv = nn.Linear(width, actions)
        self.val = nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        a = self.adv(h)
        return self.val(h) + a - a.mean(dim=1, keepdim=True)


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=120)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--gamma", type=float, default=0.95)
    ap.add_argument("--tau", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path, default="runs")
    ap.add_argument("--resume", type=pathlib.Path)
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(11)
    online = DuelingQ()
    target = PolyakTarget(online, args.tau)
    fully_shard(online.body)
    fully_shard(online)
    target.follow(online)
    opt = torch.optim.Adam(online.parameters(), lr=2e-3)

    obs, action, reward, nxt = transition_log(4096, seed=3)
    sampler = torch.Generator().manual_seed(17)
    first = 0

    def snapshot(step):
        model_sd, opt_sd = get_state_dict(online, opt)
        return {
            "online": model_sd,
            "opt": opt_sd,
            "target": target.net.state_dict(),
            "sampler": sampler.get_state(),
            "step": step,
        }

    if args.resume:
        state = snapshot(0)
        latest = max(args.resume.glob("update*"), key=lambda p: int(p.name[6:]))
        dcp.load(state, checkpoint_id=latest)
        set_state_dict(online, opt, model_state_dict=state["online"], optim_state_dict=state["opt"])
        target.net.load_state_dict(state["target"])
        sampler.set_state(state["sampler"])
        first = state["step"]

    for step in range(first, args.updates):
        picked = torch.randint(0, len(obs), (args.batch,), generator=sampler)
        mine = picked.chunk(world)[rank]
        with torch.no_grad():
            greedy = online(nxt[mine]).argmax(dim=1, keepdim=True)
            boot = target.net(nxt[mine]).gather(1, greedy).squeeze(1)
            goal = reward[mine] + args.gamma * boot
        q = online(obs[mine]).gather(1, action[mine].unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        target.update()

        if step % 20 == 0 or step == args.updates - 1:
            shown = torch.stack([loss.detach(), q.detach().mean()])
            dist.all_reduce(shown)
            if rank == 0:
                print(f"update {step} td loss {shown[0] / world:.5f} mean q {shown[1] / world:.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=args.out / f"update{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
