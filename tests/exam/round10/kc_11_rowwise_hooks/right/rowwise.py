"""Row-wise Adagrad for embedding tables, applied from the gradient hook during backward."""
import torch


def local(t):
    return t.to_local()


class RowWiseAdagrad:
    """One accumulator per row.  The tables are sharded over rows, so all of it is local to a rank.

    The gradient of a table is consumed as soon as it has been reduced and is freed at once.
    """

    def __init__(self, named_tables, lr, eps=1e-8):
        self.tables = dict(named_tables)
        self.lr, self.eps = lr, eps
        self.sums = {}
        for name, p in self.tables.items():
            self.sums[name] = torch.zeros(local(p.detach()).shape[0])
            p.register_post_accumulate_grad_hook(lambda param, name=name: self._consume(name, param))

    @torch.no_grad()
    def _consume(self, name, p):
        g = local(p.grad)
        if g.numel():
            self.sums[name] += g.pow(2).mean(dim=1)
            step = g / (self.sums[name].sqrt() + self.eps).unsqueeze(1)
            local(p.detach()).sub_(step, alpha=self.lr)
        p.grad = None
