import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class PatchEncoder(nn.Module):
    """Mel patches -> residual MLP over the mean patch -> unit embedding."""

    def __init__(self, n_mels=12, frames=4, dim=24, out=16, depth=2):
        super().__init__()
        self.frames = frames
        self.patch = nn.Linear(n_mels * frames, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.proj = nn.Linear(dim, out)

    def forward(self, mel):
        b, f, t = mel.shape
        x = mel.reshape(b, f, t // self.frames, self.frames).transpose(1, 2).flatten(2)
        x = self.patch(x)
        for blk in self.blocks:
            x = blk(x)
        return F.normalize(self.proj(x.mean(1)), dim=-1)
