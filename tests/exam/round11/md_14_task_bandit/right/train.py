"""Multi-task training in which a bandit decides which task comes next."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from curriculum import Exp3
from network import SharedNet

TASKS = {"parity": 2, "angle": 2, "cluster": 5}


def task_batch(task, visit, size):
    base = torch.Generator().manual_seed(91)
    plane, centres = torch.randn(12, 2, generator=base) / 3, torch.randn(5, 12, generator=base)
    g = torch.Generator().manual_seed(list(TASKS).index(task) * 100_000 + visit)
    if task == "cluster":
        y = torch.randint(5, (size,), generator=g)
        return centres[y] + 0.7 * torch.randn(size, 12, generator=g), y
    x = torch.randn(size, 12, generator=g)
    z = x @ plane
    return (x, (z.prod(1) > 0).long()) if task == "parity" else (x, torch.tanh(z))


def loss_of(task, out, y):
    return F.mse_loss(out, y) if task == "angle" else F.cross_entropy(out, y)


class PerTaskRMS:
    """RMSprop-like rule with a second moment of the shared trunk *per task*, so that a task with large
    gradients does not shrink the steps of the others. Slots are made when a task is first visited."""

    def __init__(self, named_params, lr=4e-3, beta=0.9, eps=1e-6):
        self.params, self.lr, self.beta, self.eps = dict(named_params), lr, beta, eps
        self.slots, self.count = {}, {}

    @torch.no_grad()
    def step(self, task):
        self.count[task] = self.count.get(task, 0) + 1
        correction = 1 - self.beta ** self.count[task]
        for name, p in self.params.items():
            if p.grad is None:
                continue
            key = f"{task}|{name}"
            if key not in self.slots:
                self.slots[key] = torch.zeros_like(p)
            v = self.slots[key].mul_(self.beta).addcmul_(p.grad, p.grad, value=1 - self.beta)
            p.addcdiv_(p.grad, (v / correction).sqrt() + self.eps, value=-self.lr)
            p.grad = None


def write(folder, step, model, opt, bandit, visits):
    path = os.path.join(folder, f"s{step}")
    dcp.save({"model": get_model_state_dict(model), "slots": opt.slots}, checkpoint_id=path)
    if dist.get_rank() == 0:
        with open(os.path.join(path, "host.json"), "w") as f:
            json.dump({"step": step, "count": opt.count, "bandit": bandit.state_dict(), "visits": visits, "keys": list(opt.slots)}, f)
    dist.barrier()


def read(folder, model, opt, bandit, visits):
    path = os.path.join(folder, max(os.listdir(folder), key=lambda d: int(d[1:])))
    with open(os.path.join(path, "host.json")) as f:
        host = json.load(f)
    # the checkpoint has slots only for the tasks visited so far
    opt.slots = {k: torch.zeros_like(opt.params[k.split("|")[1]]).detach() for k in host["keys"]}
    state = {"model": get_model_state_dict(model), "slots": opt.slots}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    opt.count = host["count"]
    bandit.load_state_dict(host["bandit"])
    visits.update(host["visits"])
    return host["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="tasks")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    model = SharedNet(12, TASKS)
    fully_shard(model.trunk)
    for head in model.heads.values():
        fully_shard(head)
    fully_shard(model)
    opt = PerTaskRMS(model.named_parameters())
    bandit, visits = Exp3(len(TASKS), seed=33), {t: 0 for t in TASKS}

    step = read(args.resume, model, opt, bandit, visits) if args.resume else 0
    while step < args.steps:
        arm = bandit.choose()
        task = list(TASKS)[arm]
        x, y = task_batch(task, visits[task], args.batch)
        visits[task] += 1
        loss = loss_of(task, model(x.chunk(world)[rank], task), y.chunk(world)[rank])
        loss.backward()
        opt.step(task)
        value = loss.detach().double()
        dist.all_reduce(value)
        value = value.item() / world
        bandit.learn(arm, value)
        step += 1
        if rank == 0 and step % 3 == 0:
            print(f"step {step} {task:8s} loss {value:.4f} next-task probabilities {bandit.probs().round(3).tolist()}")
        if args.save_every and step % args.save_every == 0:
            write(args.out, step, model, opt, bandit, visits)

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
