import torch

OBS, ACTIONS = 6, 4


class Replay:
    """Transitions of a random policy in a small navigation task; sampled with a generator of its own."""

    def __init__(self, size=768, seed=44):
        g = torch.Generator().manual_seed(seed)
        moves = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) * 0.4
        pos = torch.rand(size, 2, generator=g) * 4 - 2
        goal = torch.rand(size, 2, generator=g) * 2 - 1
        self.action = torch.randint(ACTIONS, (size,), generator=g)
        nxt = (pos + moves[self.action] + 0.05 * torch.randn(size, 2, generator=g)).clamp(-2, 2)
        self.done = ((nxt - goal).norm(dim=1) < 0.4).float()
        self.reward = 1.0 - (nxt - goal).norm(dim=1) + 2.0 * self.done
        self.state = torch.cat([pos, goal, goal - pos], 1)
        self.next_state = torch.cat([nxt, goal, goal - nxt], 1)
        self.gen = torch.Generator().manual_seed(seed + 1)

    def sample(self, batch, rank, world):
        rows = torch.randint(len(self.action), (batch,), generator=self.gen)[rank::world]
        return self.state[rows], self.action[rows], self.reward[rows], self.next_state[rows], self.done[rows]
