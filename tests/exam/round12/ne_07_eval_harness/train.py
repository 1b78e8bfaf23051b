import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness import Harness
from intents import IntentNet, calls


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=10)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    a = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(55)
    model = IntentNet()
    mesh = init_device_mesh("cpu", (world,))
    for m in model.mid:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=6e-3, total_steps=a.steps)
    harness = Harness(model)
    history, step = [], 0

    def pack():
        m, o = get_state_dict(model, opt)
        return {"m": m, "o": o, "sched": sched.state_dict(), "step": step, "history": json.dumps(history)}

    if a.resume:
        state = pack()
        dcp.load(state, checkpoint_id=os.path.join(a.resume, max(d for d in os.listdir(a.resume) if d.startswith("it"))))
        set_state_dict(model, opt, model_state_dict=state["m"], optim_state_dict=state["o"])
        sched.load_state_dict(state["sched"])
        step, history = state["step"], json.loads(state["history"])

    while step < a.steps:
        x, y = (t.chunk(world)[rank] for t in calls(2000 + step, a.batch, 1.5))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 5 == 0:
            print(f"it {step} loss {loss.item() / world:.4f}", flush=True)
        if step % a.eval_every == 0:
            history.append({"step": step, **harness.report(step)})
        if a.save_every and step % a.save_every == 0 and step < a.steps:
            dcp.save(pack(), checkpoint_id=os.path.join(a.out, f"it{step:05d}"))
    if a.out and rank == 0:
        os.makedirs(a.out, exist_ok=True)
        with open(os.path.join(a.out, "scores.json"), "w") as f:
            json.dump(history, f, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
