"""Behaviour cloning of several controllers with a mixture of experts spread over the ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from moe import Policy


def demonstrations(step, n, obs=10, actions=4, skills=4):
    g = torch.Generator().manual_seed(step)
    k = torch.randint(0, skills, (n,), generator=g)
    x = torch.randn(n, obs, generator=g)
    x[:, :skills] = F.one_hot(k, skills).float() * 2
    w = torch.randn(skills, obs, actions, generator=torch.Generator().manual_seed(1))
    return x, torch.einsum("no,noa->na", x, w[k]).tanh()


class Checkpointer:
    """Dense part by DCP; every expert in a file of its own, so that they can be loaded on another number of ranks."""

    def __init__(self, model, dense_opt, expert_opt):
        self.model, self.dense_opt, self.expert_opt = model, dense_opt, expert_opt

    def experts(self):
        for i, layer in enumerate(self.model.layers):
            for e, m in layer.experts.items():
                yield f"layer{i}_expert{e}.pt", m

    def dense(self, step):
        names = {p: n for n, p in self.model.named_parameters()}
        mom = {names[p]: s["momentum_buffer"] for p, s in self.dense_opt.state.items()}
        if not mom:
            mom = {names[p]: torch.zeros_like(p).requires_grad_(False) for p in self.dense_opt.param_groups[0]["params"]}
        weights = {n: v for n, v in get_model_state_dict(self.model).items() if ".experts." not in n}
        return {"weights": weights, "momentum": mom, "step": torch.tensor(step)}

    def save(self, folder, step):
        dcp.save(self.dense(step), checkpoint_id=os.path.join(folder, "dense"))
        for name, m in self.experts():
            mom = [self.expert_opt.state[p]["momentum_buffer"] for p in m.parameters()]
            torch.save({"weights": m.state_dict(), "momentum": mom}, os.path.join(folder, name))
        dist.barrier()

    def load(self, folder):
        state = self.dense(0)
        dcp.load(state, checkpoint_id=os.path.join(folder, "dense"))
        for n, p in self.model.named_parameters():
            if n in state["momentum"]:
                with torch.no_grad():
                    p.copy_(state["weights"][n])
                self.dense_opt.state[p]["momentum_buffer"] = state["momentum"][n]
        for name, m in self.experts():
            saved = torch.load(os.path.join(folder, name))
            m.load_state_dict(saved["weights"])
            for p, b in zip(m.parameters(), saved["momentum"]):
                self.expert_opt.state[p]["momentum_buffer"] = b
        return int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--load", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = Policy(10, 16, 4, experts=4, layers=2)
    mine = {p for layer in model.layers for p in layer.experts.parameters()}
    fully_shard(model, ignored_params=mine)
    dense_opt = torch.optim.SGD([p for n, p in model.named_parameters() if ".experts." not in n], lr=0.1, momentum=0.9)
    expert_opt = torch.optim.SGD([p for n, p in model.named_parameters() if ".experts." in n], lr=0.1, momentum=0.9)
    ck = Checkpointer(model, dense_opt, expert_opt)
    start = ck.load(args.load) if args.load else 0
    for step in range(start, args.steps):
        x, y = demonstrations(step, args.batch)
        pred, aux = model(x[rank::world])
        loss = F.mse_loss(pred, y[rank::world])
        dense_opt.zero_grad()
        expert_opt.zero_grad()
        (loss + 0.01 * aux).backward()
        for group in expert_opt.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                # rows of all ranks were summed here, each with the weight of its rank's mean
                p.grad.div_(world)
        dense_opt.step()
        expert_opt.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"{step + 1} {shown.item():.5f}", flush=True)
        if step + 1 == args.save_at:
            ck.save(args.out, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
