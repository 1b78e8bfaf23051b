"""Multi-task TD(0) value learning with PopArt; the tasks' rewards differ by orders of magnitude."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from popart import PopArtHead

TASKS, OBS = 5, 6
REWARD_SCALE = torch.tensor([0.1, 1.0, 10.0, 100.0, 3.0])


class ValueNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS + TASKS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = PopArtHead(width, TASKS)

    def forward(self, obs, task):
        hot = nn.functional.one_hot(task, TASKS).float()
        return self.head(self.trunk(torch.cat([obs, hot], dim=1)))


def transitions(step, batch):
    g = torch.Generator().manual_seed(600_000 + step)
    obs = torch.randn(batch, OBS, generator=g)
    nxt = 0.8 * obs + 0.4 * torch.randn(batch, OBS, generator=g)
    task = torch.randint(0, TASKS, (batch,), generator=g)
    signal = torch.stack([obs[:, i] + torch.sin(obs[:, i + 1]) for i in range(TASKS)], dim=1)
    reward = REWARD_SCALE[task] * (signal.gather(1, task[:, None])[:, 0] + 0.5)
    return obs, task, reward, nxt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=80)
    ap.add_argument("--gamma", type=float, default=0.8)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="popart_run")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(14)
    net = ValueNet()
    fully_shard(net.trunk)
    fully_shard(net)
    opt = torch.optim.NAdam(net.parameters(), lr=3e-3)

    first = 0
    if args.resume:
        first = max(int(name) for name in os.listdir(args.resume))
        model_sd, opt_sd = get_state_dict(net, opt)
        state = {"net": model_sd, "opt": opt_sd}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, str(first)))
        set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])

    for step in range(first, args.steps):
        obs, task, reward, nxt = (t.chunk(world)[rank] for t in transitions(step, args.batch))
        with torch.no_grad():
            ahead = net.head.denormalise(net(nxt, task)).gather(1, task[:, None])[:, 0]
            target = reward + args.gamma * ahead
        net.reshard()
        net.head.observe(target, task)
        value = net(obs, task).gather(1, task[:, None])[:, 0]
        error = value - net.head.normalise(target, task)
        loss = error.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

        if (step + 1) % 10 == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                std = " ".join(f"{v:.3g}" for v in net.head.std.tolist())
                print(f"step {step + 1} normalised td error {shown.item():.4f} std {std}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            model_sd, opt_sd = get_state_dict(net, opt)
            dcp.save({"net": model_sd, "opt": opt_sd}, checkpoint_id=os.path.join(args.out, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
