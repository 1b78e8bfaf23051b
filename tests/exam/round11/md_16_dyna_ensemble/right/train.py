"""Model-based RL: an ensemble of sharded dynamics models and a policy that is trained through them.

One round = act in the real system, fit every model on its bootstrap sample, then improve the policy by
differentiating imagined rollouts. All random numbers are drawn for the whole batch and then divided.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from buffer import ReplayBuffer
from models import OBS, Dynamics, Policy, reward, true_step


def gather_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Agent:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(25)
        self.policy = Policy()
        self.ensemble = [Dynamics() for _ in range(args.members)]
        for module in [self.policy, *self.ensemble]:
            # the modules are called several times in one graph, so they stay gathered until the backward is over
            fully_shard(module, reshard_after_forward=False)
        self.policy_opt = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.model_opts = [torch.optim.AdamW(m.parameters(), lr=5e-3) for m in self.ensemble]
        self.gen = torch.Generator().manual_seed(52)
        self.buffer = ReplayBuffer(args.members, self.gen)
        self.round = 0

    def part(self, x, dim=0):
        return x.chunk(self.world, dim)[self.rank]

    @torch.no_grad()
    def act(self):
        s = self.part(torch.randn(16, OBS, generator=self.gen))
        noise = self.part(0.4 * torch.randn(4, 16, 2, generator=self.gen), 1)
        total, rows = torch.zeros(()), []
        for t in range(4):
            a = (self.policy(s) + noise[t]).clamp(-1, 1)
            n = true_step(s, a)
            rows.append((s, a, n))
            total += reward(n, a).sum()
            s = n
        dist.all_reduce(total)
        for step in rows:  # time-major, then by episode: independent of the number of ranks
            self.buffer.add(*[gather_rows(x) for x in step])
        return total.item() / 64

    def fit_models(self):
        shown = torch.zeros(())
        for k, (model, opt) in enumerate(zip(self.ensemble, self.model_opts)):
            s, a, n, w = self.buffer.sample(self.args.batch)
            total_weight = w[:, k].sum()
            s, a, n, w = (self.part(x) for x in (s, a, n, w))
            mean, log_var = model(s, a)
            nll = 0.5 * ((n - mean) ** 2 * (-log_var).exp() + log_var).sum(-1)
            # FSDP averages over the ranks; the weights have to be divided by their global sum
            loss = (w[:, k] * nll).sum() / total_weight * self.world
            loss.backward()
            opt.step()
            opt.zero_grad()
            shown += loss.detach() / self.world / len(self.ensemble)
        dist.all_reduce(shown)
        return shown.item()

    def improve_policy(self):
        s, _, _, _ = self.buffer.sample(self.args.batch)
        pick = torch.randint(len(self.ensemble), (self.args.imagine,), generator=self.gen)
        eps = torch.randn(self.args.imagine, self.args.batch, OBS, generator=self.gen)
        s = self.part(s)
        value = 0.0
        for t, k in enumerate(pick.tolist()):
            a = self.policy(s)
            mean, log_var = self.ensemble[k](s, a)
            s = mean + (0.5 * log_var).exp() * self.part(eps[t]) * 0.3
            value = value + 0.95 ** t * reward(s, a).mean()
        (-value).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 2.0)
        self.policy_opt.step()
        self.policy_opt.zero_grad()
        for opt in self.model_opts:  # the models only passed the gradient on
            opt.zero_grad()

    def state_dict(self):
        """Each rank keeps its own shards, and a copy of the buffer."""
        return {"policy": self.policy.state_dict(), "policy_opt": self.policy_opt.state_dict(),
                "models": [m.state_dict() for m in self.ensemble], "model_opts": [o.state_dict() for o in self.model_opts],
                "buffer": self.buffer.data, "gen": self.gen.get_state(), "round": self.round, "world": self.world}

    def load_state_dict(self, state):
        assert state["world"] == self.world, "shards were written by another number of ranks"
        self.policy.load_state_dict(state["policy"])
        self.policy_opt.load_state_dict(state["policy_opt"])
        for m, o, ms, os_ in zip(self.ensemble, self.model_opts, state["models"], state["model_opts"]):
            m.load_state_dict(ms)
            o.load_state_dict(os_)
        self.buffer.data = state["buffer"]
        self.gen.set_state(state["gen"])
        self.round = state["round"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--members", type=int, default=3)
    ap.add_argument("--imagine", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="dyna")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    agent = Agent(args)
    if args.resume:
        newest = max(d for d in os.listdir(args.resume) if d.startswith("round_"))
        agent.load_state_dict(torch.load(os.path.join(args.resume, newest, f"rank{agent.rank}.pt"), weights_only=False))

    while agent.round < args.rounds:
        real = agent.act()
        nll = agent.fit_models()
        agent.improve_policy()
        agent.round += 1
        if agent.rank == 0 and agent.round % 3 == 0:
            print(f"round {agent.round} reward {real:.4f} model nll {nll:.4f} transitions {len(agent.buffer.data['s'])}")
        if args.save_every and agent.round % args.save_every == 0:
            folder = os.path.join(args.out, f"round_{agent.round:04d}")
            os.makedirs(folder, exist_ok=True)
            torch.save(agent.state_dict(), os.path.join(folder, f"rank{agent.rank}.pt"))
            dist.barrier()

    if args.export:
        full = {"policy": {k: v.full_tensor() for k, v in agent.policy.state_dict().items()}}
        for i, m in enumerate(agent.ensemble):
            full[f"model{i}"] = {k: v.full_tensor() for k, v in m.state_dict().items()}
        if agent.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
