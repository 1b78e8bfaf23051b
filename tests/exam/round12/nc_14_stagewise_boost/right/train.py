import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import persistence
from ensemble import Ensemble
from table import claims, rows

STAGES, STAGE_STEPS, BATCH = 4, 13, 96


def make_opt(learner):
    return torch.optim.Adam(learner.parameters(), lr=0.02)


def main():
    ap = argparse.ArgumentParser(description="boosting with neural weak learners")
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0, help="besides the end of each stage")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = claims()
    ensemble = Ensemble(init_device_mesh("cpu", (world,)), x.shape[1])
    step, opt = persistence.load(args.resume, ensemble, make_opt) if args.resume else (0, None)

    while step < STAGES * STAGE_STEPS:
        stage, inside = divmod(step, STAGE_STEPS)
        if inside == 0:
            if ensemble.learners:
                ensemble.close()
            opt = make_opt(ensemble.grow())
        learner, earlier = ensemble.learners[stage], ensemble.learners[:stage]
        ids = rows(step, BATCH, len(x), rank, world)
        residual = y[ids] - ensemble.predict(x[ids], earlier)
        loss = (learner(x[ids]) - residual).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if inside % 6 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"stage {stage} step {step} loss {mean.item():.4f}", flush=True)
        if args.out and (step % STAGE_STEPS == 0 or (args.save_every and step % args.save_every == 0)):
            if step < STAGES * STAGE_STEPS:
                persistence.save(args.out, step, ensemble, opt)

    part = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
    error = (ensemble.predict(x[part]) - y[part]).square().sum()
    dist.all_reduce(error)
    if rank == 0:
        print(f"mse of the ensemble {error.item() / len(x):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
