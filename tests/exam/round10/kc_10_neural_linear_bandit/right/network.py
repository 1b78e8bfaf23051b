from torch import nn


class FeatureNet(nn.Module):
    def __init__(self, context=6, width=32, features=12, arms=4):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(context, width), nn.GELU(), nn.Linear(width, features), nn.Tanh()
        )
        self.head = nn.Linear(features, arms)

    def forward(self, x, features_only=False):
        f = self.trunk(x)
        return f if features_only else self.head(f)
