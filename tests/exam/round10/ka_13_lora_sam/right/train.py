import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lora import LEN, VOCAB, InstructLM
from sam import SAM

ADAPTERS = StateDictOptions(ignore_frozen_params=True, strict=False)


def instructions(step, n):
    """First token tells the task: 0 repeat, 1 reverse, 2 shift by one. The answer has as many tokens as the question."""
    g = torch.Generator().manual_seed(42_000 + step)
    k = (LEN - 1) // 2
    task = torch.randint(0, 3, (n,), generator=g)
    question = torch.randint(4, VOCAB, (n, k), generator=g)
    shifted = (question - 4 + 1) % (VOCAB - 4) + 4
    answer = torch.where((task == 0)[:, None], question, torch.where((task == 1)[:, None], question.flip(1), shifted))
    return torch.cat([task[:, None], question, answer], 1), k


class Run:
    def __init__(self, steps=16, batch=24, lr=2e-2, rho=0.05):
        self.steps, self.batch, self.lr = steps, batch, lr
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(64)
        self.model = InstructLM()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.opt = torch.optim.SGD(trainable, lr=lr, momentum=0.9)
        self.sam = SAM(self.opt, rho)
        self.sched = torch.optim.lr_scheduler.LinearLR(self.opt, 1.0, 0.2, total_iters=steps)
        self.step = 0

    def state(self):
        model, opt = get_state_dict(self.model, self.opt, options=ADAPTERS)
        return {"adapters": model, "opt": opt, "sched": self.sched.state_dict(), "step": self.step}

    def restore(self, root):
        last = max(int(n.split(".")[1]) for n in os.listdir(root))
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(root, f"adapters.{last}"))
        set_state_dict(self.model, self.opt, model_state_dict=state["adapters"], optim_state_dict=state["opt"], options=ADAPTERS)
        self.sched.load_state_dict(state["sched"])
        self.step = state["step"]

    def one_step(self):
        ids, k = instructions(self.step, self.batch)
        mine = ids[self.rank :: self.world]

        def closure():
            logits = self.model(mine[:, :-1])[:, -k:]
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, -k:].flatten())
            loss.backward()
            return loss.detach()

        loss, norm = self.sam.step(closure)
        self.sched.step()
        self.step += 1
        dist.all_reduce(loss)
        return loss.item() / self.world, norm.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(lr=0.3)
    if args.resume:
        run.restore(args.resume)
    while run.step < run.steps:
        loss, norm = run.one_step()
        if run.rank == 0:
            print(f"step {run.step} loss {loss:.5f} grad norm {norm:.4f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            dcp.save(run.state(), checkpoint_id=os.path.join(args.out, f"adapters.{run.step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
