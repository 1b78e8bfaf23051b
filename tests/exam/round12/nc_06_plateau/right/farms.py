"""Ten-minute records of wind farms: speed, direction, air density, turbulence -> power."""
import torch

FARMS, TRAIN_ROWS, VALID_ROWS = 8, 64, 24


def _records(farm, n, seed):
    g = torch.Generator().manual_seed(seed * 100 + farm)
    speed = 4 + 9 * torch.rand(n, generator=g)
    angle = 6.2832 * torch.rand(n, generator=g)
    density = 1.2 + 0.05 * torch.randn(n, generator=g)
    turbulence = 0.1 + 0.1 * torch.rand(n, generator=g)
    power = torch.sigmoid(speed - 8) * density * (1 + 0.2 * torch.cos(angle + 0.3 * farm))
    # the sensors of the farms differ in quality
    power = power + (0.02 + 0.05 * farm) * torch.randn(n, generator=g)
    x = torch.stack([(speed - 8.5) / 3, angle.sin(), angle.cos(), (density - 1.2) * 20, turbulence * 5], 1)
    return x, power[:, None]


class FarmData:
    def __init__(self, rank, world, seed=6):
        per = FARMS // world
        self.farms = range(rank * per, (rank + 1) * per)
        self.train = [_records(f, TRAIN_ROWS, seed) for f in self.farms]
        self.valid = [_records(f, VALID_ROWS, seed + 1) for f in self.farms]

    def batch(self, step, rows):
        xs, ys = [], []
        for f, (x, y) in zip(self.farms, self.train):
            pick = torch.randperm(len(x), generator=torch.Generator().manual_seed(step * 31 + f))[:rows]
            xs.append(x[pick])
            ys.append(y[pick])
        return torch.cat(xs), torch.cat(ys)

    def validation(self):
        return torch.cat([x for x, _ in self.valid]), torch.cat([y for _, y in self.valid])
