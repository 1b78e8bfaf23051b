import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Print:
    def __call__(self, ev):
        if dist.get_rank() == 0:
            print("step {step} loss {loss:.4f} len {length} lr {lr:.1e}".format(**ev), flush=True)


class Save:
    def __init__(self, every, out, state):
        self.every, self.out, self.state = every, out, state

    def __call__(self, ev):
        if self.every and ev["step"] % self.every == 0:
            dcp.save(self.state(ev["step"]), checkpoint_id=os.path.join(self.out, f"n{ev['step']:05d}"))


class StopAt:
    def __init__(self, step):
        self.step = step

    def __call__(self, ev):
        return ev["step"] >= self.step
