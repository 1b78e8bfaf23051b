import torch


class BallStreams:
    """Endless videos of a bouncing ball; a stream starts anew at times of its own. The position of the balls is state
    and is saved with the model."""

    def __init__(self, n, side=10, seed=0):
        self.n, self.side = n, side
        self.gen = torch.Generator().manual_seed(seed)
        self.pos = torch.rand(n, 2, generator=self.gen) * side
        self.vel = torch.randn(n, 2, generator=self.gen)

    def chunk(self, length):
        """frames [T, n, 1, S, S] and flags [T, n] that are true where a new video begins"""
        grid = torch.arange(self.side).float()
        frames, begins = [], []
        for _ in range(length):
            new = torch.rand(self.n, generator=self.gen) < 0.08
            self.pos = torch.where(new[:, None], torch.rand(self.n, 2, generator=self.gen) * self.side, self.pos)
            self.vel = torch.where(new[:, None], torch.randn(self.n, 2, generator=self.gen), self.vel)
            self.pos = self.pos + self.vel
            out = (self.pos < 0) | (self.pos > self.side - 1)
            self.vel = torch.where(out, -self.vel, self.vel)
            self.pos = self.pos.clamp(0, self.side - 1)
            d = (grid[None, None, :] - self.pos[:, 0, None, None]) ** 2 + (grid[None, :, None] - self.pos[:, 1, None, None]) ** 2
            frames.append(torch.exp(-d / 3)[:, None])
            begins.append(new)
        return torch.stack(frames), torch.stack(begins)

    def state_dict(self):
        return {"pos": self.pos.clone(), "vel": self.vel.clone(), "gen": self.gen.get_state()}

    def load_state_dict(self, s):
        self.pos, self.vel = s["pos"], s["vel"]
        self.gen.set_state(s["gen"])
