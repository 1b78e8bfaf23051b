import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.pre, self.post = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.pre(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ff(self.post(x))


class TinyLM(nn.Module):
    def __init__(self, vocab, length, dim=32, heads=2, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(length, dim))
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(vocab, length, seed):
    """Built on meta, materialised after sharding; every rank fills the full tensors from one seed and keeps its part."""
    with torch.device("meta"):
        model = TinyLM(vocab, length)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    g = torch.Generator().manual_seed(seed)
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                full = torch.randn(p.shape, generator=g) * (0.3 if name.startswith("tok") else p.shape[1] ** -0.5)
            else:
                full = (
                    torch.ones(p.shape)
                    if name.endswith(("pre.weight", "post.weight", "norm.weight"))
                    else torch.zeros(p.shape)
                )
            if name == "pos":
                full *= 0.02
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None))
    return model
