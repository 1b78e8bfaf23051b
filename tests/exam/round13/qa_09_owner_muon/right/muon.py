"""Muon for row-sharded parameters.

Every matrix has one owner rank. The owner keeps the momentum of the whole matrix, orthogonalises it and broadcasts the
update; all ranks then apply their rows. The work is spread evenly over the ranks and no rank repeats another's.
"""
import torch
import torch.distributed as dist


def newton_schulz(m, rounds=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = m.shape[0] > m.shape[1]
    x = m.T if tall else m
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
    return x.T if tall else x


class OwnerMuon:
    def __init__(self, named, lr=0.02, momentum=0.9):
        self.named = sorted(named, key=lambda kv: (-kv[1].numel(), kv[0]))
        self.lr, self.momentum = lr, momentum
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.buffers = {}

    def owner(self, i):
        return i % self.world

    def _rows(self, p, full):
        """The rows of `full` which this rank holds of p (fully_shard cuts as torch.chunk does)."""
        pieces = torch.chunk(full, self.world, dim=0)
        return pieces[self.rank] if self.rank < len(pieces) else full[:0]

    @torch.no_grad()
    def step(self):
        for i, (name, p) in enumerate(self.named):
            grad = p.grad.full_tensor()
            if self.owner(i) == self.rank:
                buf = self.buffers.setdefault(name, torch.zeros_like(grad))
                buf.lerp_(grad, 1 - self.momentum)
                update = newton_schulz(grad.lerp(buf, self.momentum)).contiguous()
            else:
                update = torch.empty_like(grad)
            dist.broadcast(update, src=self.owner(i))
            scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            p.to_local().add_(self._rows(p, update), alpha=-self.lr * scale)

    def zero_grad(self):
        for _, p in self.named:
            p.grad = None

    def state_dict(self):
        """All momenta, on every rank (owners differ with the number of ranks, the file does not)."""
        out = {}
        for i, (name, p) in enumerate(self.named):
            buf = self.buffers[name] if self.owner(i) == self.rank else torch.empty(p.shape)
            dist.broadcast(buf, src=self.owner(i))
            out[name] = buf
        return out

    def load_state_dict(self, state):
        self.buffers = {n: state[n].clone() for i, (n, _) in enumerate(self.named) if self.owner(i) == self.rank}
