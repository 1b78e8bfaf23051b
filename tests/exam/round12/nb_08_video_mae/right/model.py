import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

FRAMES, SIDE, PATCH = 4, 12, 4
TOKENS = FRAMES * (SIDE // PATCH) ** 2


def to_tokens(clip):
    b = clip.shape[0]
    k = SIDE // PATCH
    x = clip.view(b, FRAMES, k, PATCH, k, PATCH).permute(0, 1, 2, 4, 3, 5)
    return x.reshape(b, TOKENS, PATCH * PATCH)


class MixerBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Linear(TOKENS, TOKENS)
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, h):
        h = h + self.across(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        return h + self.within(self.norm2(h))


class VideoMAE(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.mask_token = nn.Parameter(0.02 * torch.randn(width))
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.blocks = nn.ModuleList(MixerBlock(width) for _ in range(depth))
        self.predict = nn.Linear(width, PATCH * PATCH)

    def forward(self, tokens, hide):
        h = torch.where(hide[..., None], self.mask_token, self.embed(tokens)) + self.position
        for block in self.blocks:
            h = block(h)
        error = (self.predict(h) - tokens).pow(2).mean(-1)
        return error[hide].mean()


def build(seed):
    torch.manual_seed(seed)
    model = VideoMAE()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model
