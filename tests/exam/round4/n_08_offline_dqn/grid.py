"""A slippery 6x6 grid world with a goal and two pits, and a log of random play."""
import torch

SIZE, GOAL, PITS = 6, (5, 5), {(2, 3), (4, 1)}
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]


def encode(pos):
    x = torch.zeros(2 * SIZE)
    x[pos[0]], x[SIZE + pos[1]] = 1.0, 1.0
    return x


def move(pos, action):
    dx, dy = MOVES[action]
    new = (min(max(pos[0] + dx, 0), SIZE - 1), min(max(pos[1] + dy, 0), SIZE - 1))
    if new == GOAL:
        return new, 1.0, True
    if new in PITS:
        return new, -1.0, True
    return new, -0.02, False


def random_play(n=1024, seed=6):
    g = torch.Generator().manual_seed(seed)
    rows, pos = [], (0, 0)
    for _ in range(n):
        a = int(torch.randint(4, (1,), generator=g))
        slip = int(torch.randint(4, (1,), generator=g)) if torch.rand(1, generator=g) < 0.1 else a
        new, r, done = move(pos, slip)
        rows.append((encode(pos), a, r, encode(new), float(done)))
        pos = tuple(torch.randint(SIZE - 1, (2,), generator=g).tolist()) if done else new
    s, a, r, s2, d = zip(*rows)
    return torch.stack(s), torch.tensor(a), torch.tensor(r), torch.stack(s2), torch.tensor(d)
