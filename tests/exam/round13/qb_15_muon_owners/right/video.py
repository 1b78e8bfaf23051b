import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.n2(x))))


class NextFrame(nn.Module):
    """Predicts frame t+1 from frames 0..t."""

    def __init__(self, pixels=16, dim=24, depth=2, frames=6):
        super().__init__()
        self.inp = nn.Linear(pixels, dim)
        self.pos = nn.Parameter(0.1 * torch.randn(frames, dim))
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, pixels)

    def forward(self, clip):
        h = self.inp(clip) + self.pos[: clip.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return clip + self.out(h)


def moving_dots(seed, n, frames=7):
    g = torch.Generator().manual_seed(seed)
    p, v = torch.randint(4, (n, 2), generator=g), torch.randint(-1, 2, (n, 2), generator=g)
    at = (p[:, None] + v[:, None] * torch.arange(frames)[None, :, None]) % 4
    clip = nn.functional.one_hot(at[..., 0] * 4 + at[..., 1], 16).float()
    return clip[:, :-1], clip[:, 1:]
