import torch


def all_questions(vocab=12, seed=1):
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(vocab, (84, 3), generator=g)
    q[:, 2] = q[:, 2] % 2
    answer = torch.where(q[:, 2] == 0, q[:, 0] + q[:, 1], q[:, 0] * q[:, 1]) % 4
    return q, answer


class Mixture:
    """Each step: some micro-batches of new questions, then one of the retention set."""

    def __init__(self, retained=60, new_micro=3, micro=8, group=8):
        self.q, self.a = all_questions()
        self.retained, self.new_micro, self.micro, self.group = retained, new_micro, micro, group

    def retention_set(self):
        return self.q[: self.retained], self.a[: self.retained], self.q[self.retained :]

    def step_batches(self, step, rank, world):
        """Questions and the uniform numbers for sampling; this rank's part of every micro-batch."""
        g = torch.Generator().manual_seed(300 + step)
        local = self.micro // world
        mine = slice(rank * local, (rank + 1) * local)
        for k in range(self.new_micro + 1):
            if k < self.new_micro:
                pick = torch.randint(self.retained, len(self.q), (self.micro,), generator=g)
            else:
                pick = torch.randint(self.retained, (self.micro,), generator=g)
            u = torch.rand(self.micro, self.group, generator=g)
            yield self.q[pick[mine]], self.a[pick[mine]], u[mine]
