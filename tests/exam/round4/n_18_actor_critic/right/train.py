"""PPO with separate actor and critic, two optimizers and one clip over both."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from nets import build
from pendulum import Pendulums
from rollout import collect


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=9)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0, help="optimizer steps, rounded to whole iterations")
    ap.add_argument("--out", default="runs/ppo")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    actor, critic = build(init_device_mesh("cpu", (world,)))
    opt_a = torch.optim.Adam(actor.parameters(), lr=4e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
    both = list(itertools.chain(actor.parameters(), critic.parameters()))

    def state(it):
        am, ao = get_state_dict(actor, opt_a)
        cm, co = get_state_dict(critic, opt_c)
        return {"actor": am, "opt_a": ao, "critic": cm, "opt_c": co, "iteration": it}

    it = 0
    if args.resume:
        sd = state(0)
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(actor, opt_a, model_state_dict=sd["actor"], optim_state_dict=sd["opt_a"])
        set_state_dict(critic, opt_c, model_state_dict=sd["critic"], optim_state_dict=sd["opt_c"])
        it = sd["iteration"]

    per, saved = args.envs // world, it * args.epochs
    while it < args.iterations:
        envs = Pendulums(per, rank * per, seed=it)
        obs, acts, old, adv, ret, reward = collect(actor, critic, envs)
        for epoch in range(args.epochs):
            logp = actor(obs).log_softmax(-1)
            ratio = (logp.gather(-1, acts[..., None]).squeeze(-1) - old).exp()
            gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            entropy = -(logp.exp() * logp).sum(-1).mean()
            value = (critic(obs).squeeze(-1) - ret).pow(2).mean()
            (-gain - 0.01 * entropy + 0.5 * value).backward()
            torch.nn.utils.clip_grad_norm_(both, 1.0)
            for opt in (opt_a, opt_c):
                opt.step()
                opt.zero_grad()
        it += 1
        dist.all_reduce(value.detach_())
        if rank == 0:
            print(f"iteration {it} reward {reward:.4f} value loss {value.item() / world:.4f}", flush=True)
        if args.save_every and it * args.epochs - saved >= args.save_every:
            saved = it * args.epochs
            dcp.save(state(it), checkpoint_id=os.path.join(args.out, f"it_{it:05d}"))

    if args.export:
        full = {n: {k: v.full_tensor() for k, v in m.state_dict().items()} for n, m in (("actor", actor), ("critic", critic))}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
