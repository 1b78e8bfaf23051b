import torch


class Polyak:
    """Slowly moves a target network towards the online one."""

    def __init__(self, online, target, tau):
        self.tau = tau
        self.online = list(online.parameters())
        self.target = list(target.parameters())

    @torch.no_grad()
    def step(self):
        for p, t in zip(self.online, self.target):
            t.lerp_(p, self.tau)
