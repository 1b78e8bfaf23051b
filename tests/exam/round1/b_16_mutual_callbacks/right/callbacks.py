import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Callback:
    def on_start(self, loop): ...
    def on_batch(self, loop, x, y):
        return x, y

    def on_step(self, loop, logs): ...
    def on_end(self, loop): ...


class Augment(Callback):
    """Random sign flip and noise, drawn for the whole batch before it is cut."""

    def on_batch(self, loop, x, y):
        g = torch.Generator().manual_seed(70_000 + loop.step)
        keep = (torch.rand(len(x), 1, 1, 1, generator=g) < 0.8).float()
        return x * keep + 0.3 * torch.randn(x.shape, generator=g), y


class Printer(Callback):
    def __init__(self, every):
        self.every = every

    def on_step(self, loop, logs):
        if loop.step % self.every == 0:
            v = torch.tensor(list(logs.values()))
            dist.all_reduce(v)
            if loop.rank == 0:
                print(
                    f"step {loop.step} " + " ".join(f"{k} {x:.4f}" for k, x in zip(logs, (v / loop.world).tolist())),
                    flush=True,
                )


class Schedulers(Callback):
    def __init__(self, factory):
        self.factory = factory

    def on_start(self, loop):
        loop.schedulers = [self.factory(p.opt) for p in loop.peers]

    def on_step(self, loop, logs):
        for s in loop.schedulers:
            s.step()


class Checkpoint(Callback):
    def __init__(self, every, out, resume):
        self.every, self.out, self.resume = every, out, resume

    def on_start(self, loop):
        if self.resume:
            newest = max(os.listdir(self.resume), key=lambda n: int(n.rpartition(".")[2]))
            dcp.load({"loop": loop}, checkpoint_id=os.path.join(self.resume, newest))

    def on_step(self, loop, logs):
        if self.every and loop.step % self.every == 0:
            dcp.save({"loop": loop}, checkpoint_id=os.path.join(self.out, f"mutual.{loop.step}"))


class Export(Callback):
    def __init__(self, path):
        self.path = path

    def on_end(self, loop):
        if self.path:
            full = {p.name: {k: v.full_tensor() for k, v in p.net.state_dict().items()} for p in loop.peers}
            if loop.rank == 0:
                torch.save(full, self.path)
