import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class GatedConvLayer(nn.Module):
    def __init__(self, dim, kernel):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.RMSNorm(dim)
        self.mix = nn.Linear(kernel * dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = F.pad(self.norm(x), (0, 0, self.kernel - 1, 0)).unfold(1, self.kernel, 1).flatten(2)
        a, g = self.mix(h).chunk(2, -1)
        return x + self.out(a * torch.sigmoid(g))


class ConvLM(nn.Module):
    def __init__(self, vocab=50, dim=24, depth=3, kernel=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GatedConvLayer(dim, kernel) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.unembed = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x)).float()


def build(seed):
    torch.manual_seed(seed)
    model = ConvLM()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)
