import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from acoustic import AcousticModel, sentences
from averaging import WeightEMA


class Callback:
    def after_step(self, t):
        pass

    def at_end(self, t):
        pass


class Validate(Callback):
    """Mel error of the averaged model on held-out sentences."""

    def __init__(self, every):
        self.every = every

    def after_step(self, t):
        if t.step % self.every == 0:
            phones, mel = (x.chunk(t.world)[t.rank] for x in sentences(999_999, 16))
            with t.ema.applied_to(t.model):
                err = F.mse_loss(t.model(phones), mel)
            dist.all_reduce(err)
            t.say(f"step {t.step} validation mse {err.item() / t.world:.5f}")


class Save(Callback):
    def __init__(self, root, every):
        self.root, self.every = root, every

    def after_step(self, t):
        if self.every and t.step % self.every == 0:
            dcp.save(t.state(), checkpoint_id=os.path.join(self.root, f"it{t.step}"))


class Trainer:
    def __init__(self, callbacks, steps=22, batch=16):
        self.callbacks, self.steps, self.batch = callbacks, steps, batch
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        self.model = AcousticModel()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.RAdam(self.model.parameters(), lr=1e-2)
        self.ema = WeightEMA(self.model, decay=0.9)
        self.step = 0

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def state(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "ema": self.ema.state_dict(), "step": self.step}

    def restore(self, root):
        last = max(int(n[2:]) for n in os.listdir(root) if n.startswith("it"))
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(root, f"it{last}"))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.ema.load_state_dict(state["ema"])
        self.step = state["step"]

    def fit(self):
        while self.step < self.steps:
            phones, mel = (x.chunk(self.world)[self.rank] for x in sentences(self.step, self.batch))
            loss = F.mse_loss(self.model(phones), mel)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.ema.update(self.model)
            self.step += 1
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            self.say(f"step {self.step} loss {shown.item() / self.world:.4f}")
            for c in self.callbacks:
                c.after_step(self)
        for c in self.callbacks:
            c.at_end(self)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer([Validate(every=11), Save(args.out, args.save_every)])
    if args.resume:
        trainer.restore(args.resume)
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
