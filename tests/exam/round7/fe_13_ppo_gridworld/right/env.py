import torch

SIZE = 5
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class GridWorlds:
    """A vector of grids; the agent walks to a goal. All random numbers of all grids come from one stream."""

    def __init__(self, count, seed):
        self.count = count
        self.rng = torch.Generator().manual_seed(seed)
        self.agent = torch.randint(SIZE, (count, 2), generator=self.rng)
        self.goal = torch.randint(SIZE, (count, 2), generator=self.rng)
        self.age = torch.zeros(count, dtype=torch.long)

    def observe(self):
        flat = lambda p: torch.nn.functional.one_hot(p[:, 0] * SIZE + p[:, 1], SIZE * SIZE).float()
        return torch.cat([flat(self.agent), flat(self.goal)], dim=1)

    def step(self, action):
        self.agent = (self.agent + MOVES[action]).clamp(0, SIZE - 1)
        self.age += 1
        reached = (self.agent == self.goal).all(1)
        done = reached | (self.age >= 12)
        reward = reached.float() - 0.05
        # drawn for every grid, used where an episode has ended
        agent = torch.randint(SIZE, (self.count, 2), generator=self.rng)
        goal = torch.randint(SIZE, (self.count, 2), generator=self.rng)
        self.agent = torch.where(done[:, None], agent, self.agent)
        self.goal = torch.where(done[:, None], goal, self.goal)
        self.age = torch.where(done, 0, self.age)
        return reward, done

    def uniform(self):
        return torch.rand(self.count, generator=self.rng)

    def state_dict(self):
        return {"agent": self.agent.clone(), "goal": self.goal.clone(), "age": self.age.clone(), "rng": self.rng.get_state()}

    def load_state_dict(self, state):
        self.agent, self.goal, self.age = state["agent"], state["goal"], state["age"]
        self.rng.set_state(state["rng"])
