import argparse
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from physics import InverseProblem, exact
from sharding import average_loose_gradients, shard


@dataclass
class Config:
    steps: int = 24
    points: int = 32
    sensors: int = 16
    lr: float = 0.01
    coef_lr: float = 0.05
    residual_weight: float = 0.5


def draw(cfg, step, rank, world):
    """Collocation points and sensor readings of a step: drawn for all ranks, each keeps its share."""
    g = torch.Generator().manual_seed(90_000 + step)
    points = torch.rand(cfg.points, 2, generator=g)
    sensors = torch.rand(cfg.sensors, 2, generator=g)
    noise = 0.01 * torch.randn(cfg.sensors, 2, generator=g)
    share = lambda t: t.chunk(world)[rank]
    return share(points), share(sensors), share(exact(sensors) + noise)


def save(folder, rank, problem, optims, step):
    os.makedirs(folder, exist_ok=True)
    torch.save({"model": problem.state_dict(), "optims": [o.state_dict() for o in optims], "step": step},
               os.path.join(folder, f"rank{rank}.pt"))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="")
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--resume", default="")
    ap.add_argument("--report", default="", help="json file for the fitted coefficients")
    args = ap.parse_args()
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    problem = shard(InverseProblem())
    optims = [torch.optim.Adam(problem.field.parameters(), lr=cfg.lr),
              torch.optim.Adam(problem.coef.parameters(), lr=cfg.coef_lr)]
    start = 0
    if args.resume:
        state = torch.load(os.path.join(args.resume, f"rank{rank}.pt"), weights_only=False)
        problem.load_state_dict(state["model"])
        for o, s in zip(optims, state["optims"]):
            o.load_state_dict(s)
        start = state["step"]

    for step in range(start, cfg.steps):
        fit, residual = problem(*draw(cfg, step, rank, world))
        loss = fit + cfg.residual_weight * residual
        for o in optims:
            o.zero_grad()
        loss.backward()
        average_loose_gradients(problem.coef)
        for o in optims:
            o.step()
        if (step + 1) % 6 == 0:
            shown = torch.stack([loss.detach(), fit.detach(), residual.detach()])
            dist.all_reduce(shown)
            loss_, fit_, res_ = (shown / world).tolist()
            if rank == 0:
                print(f"step {step + 1} loss {loss_:.6f} fit {fit_:.6f} residual {res_:.6f}", flush=True)
        if args.save_at and step + 1 == args.save_at:
            save(args.out, rank, problem, optims, step + 1)

    if rank == 0:
        found = {"diffusivity": problem.coef.log_d.exp().item(), "rates": problem.coef.log_rates.exp().tolist()}
        print("found", json.dumps(found))
        if args.report:
            with open(args.report, "w") as f:
                json.dump(found, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
