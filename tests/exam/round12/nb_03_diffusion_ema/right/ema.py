import contextlib

import torch


class ShardedEMA:
    """Exponential moving average of the weights; every rank averages the shard it owns."""

    def __init__(self, model, decay, dtype):
        self.decay, self.dtype = decay, dtype
        self.shadow = {n: p.detach().clone().to(dtype) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            s = self.shadow[n].to_local()
            s.lerp_(p.to_local().to(s.dtype), 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self, model):
        with torch.no_grad():
            kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for n, p in model.named_parameters():
                p.to_local().copy_(self.shadow[n].to_local())
            try:
                yield model
            finally:
                for n, p in model.named_parameters():
                    p.to_local().copy_(kept[n].to_local())
