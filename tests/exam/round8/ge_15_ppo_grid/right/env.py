import torch

SIZE, ACTIONS = 6, 4


class GridEnvs:
    """A batch of small grids: walk to the goal; hitting a wall costs a little. Restarts by itself."""

    def __init__(self, count, draws):
        self.count, self.draws = count, draws
        self.agent, self.goal = draws.cells(), draws.cells()

    def observe(self):
        delta = (self.goal - self.agent).float()
        return torch.cat([self.agent.float(), self.goal.float(), delta, 10 * delta.sign()], 1)

    def step(self, action):
        moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[action]
        wanted = self.agent + moves
        self.agent = wanted.clamp(0, SIZE - 1)
        wall = (wanted != self.agent).any(1)
        done = (self.agent == self.goal).all(1)
        reward = done.float() - 0.1 * wall.float() - 0.02
        fresh_agent, fresh_goal = self.draws.cells(), self.draws.cells()
        self.agent = torch.where(done.unsqueeze(1), fresh_agent, self.agent)
        self.goal = torch.where(done.unsqueeze(1), fresh_goal, self.goal)
        return reward, done


class Draws:
    """Random numbers for all environments of all ranks; a rank uses the rows of its own environments."""

    def __init__(self, seed, total, rank, world):
        self.g = torch.Generator().manual_seed(seed)
        self.total = total
        n = total // world
        self.rows = slice(rank * n, (rank + 1) * n)

    def cells(self):
        return torch.randint(SIZE, (self.total, 2), generator=self.g)[self.rows]

    def gumbel(self, width):
        u = torch.rand(self.total, width, generator=self.g).clamp(1e-6, 1 - 1e-6)
        return -torch.log(-torch.log(u))[self.rows]
