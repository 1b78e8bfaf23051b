import torch


class Corridors:
    """Many small grid worlds at once: walk to the goal, the pits end the episode. All of it is tensors."""

    moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])

    def __init__(self, n, size=5, limit=15):
        self.n, self.size, self.limit = n, size, limit
        self.state = {"pos": torch.zeros(n, 2, dtype=torch.long), "goal": torch.zeros(n, 2, dtype=torch.long), "age": torch.zeros(n, dtype=torch.long)}

    def reset(self, which, gen):
        s, full = self.state, (self.n, 2)
        for key in ("pos", "goal"):
            fresh = torch.randint(0, self.size, full, generator=gen)
            s[key] = torch.where(which[:, None], fresh, s[key])
        s["age"] = torch.where(which, 0, s["age"])

    def observe(self):
        s = self.state
        eye = torch.eye(self.size)
        return torch.cat([eye[s["pos"]].flatten(1), eye[s["goal"]].flatten(1), ((s["goal"] - s["pos"]) / self.size)], 1)

    def step(self, action):
        s = self.state
        s["pos"] = (s["pos"] + self.moves[action]).clamp(0, self.size - 1)
        s["age"] = s["age"] + 1
        won = (s["pos"] == s["goal"]).all(1)
        pit = (s["pos"] == self.size // 2).all(1) & ~won
        reward = won.float() - pit.float() - 0.02
        return reward, won | pit, s["age"] >= self.limit
