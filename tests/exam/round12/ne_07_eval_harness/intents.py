"""Intent classification over synthetic call-centre embeddings."""
import torch
from torch import nn

from harness import suite

FEATURES, INTENTS = 24, 6


class IntentNet(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.mid = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.leave = nn.Linear(width, INTENTS)

    def forward(self, x):
        x = self.enter(x)
        for m in self.mid:
            x = x + m(x)
        return self.leave(x)


def calls(seed, n, noise):
    centres = torch.randn(INTENTS, FEATURES, generator=torch.Generator().manual_seed(9))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, INTENTS, (n,), generator=g)
    level = noise if torch.is_tensor(noise) else torch.full((n,), float(noise))
    return centres[y] + level.unsqueeze(1) * torch.randn(n, FEATURES, generator=g), y


@suite("clean")
def clean():
    return calls(70, 45, 1.4)


@suite("graded")
def graded():
    # recordings sorted from quiet to noisy
    return calls(71, 37, torch.linspace(0.2, 4.0, 37))
