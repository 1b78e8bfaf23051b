import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LEN, DIM = 32, 14, 48


class LoRALinear(nn.Module):
    def __init__(self, inp, out, rank=4, alpha=8.0):
        super().__init__()
        self.base = nn.Linear(inp, out)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, inp) / inp**0.5)
        self.lora_b = nn.Parameter(torch.zeros(out, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.T) @ self.lora_b.T


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = LoRALinear(DIM, 3 * DIM), LoRALinear(DIM, DIM)
        self.up, self.down = LoRALinear(DIM, 2 * DIM), LoRALinear(2 * DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class InstructLM(nn.Module):
    """The 'pre-trained' base is frozen; adapters and the output layer are trained."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(LEN, DIM) * 0.2)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)
        for name, p in self.named_parameters():
            p.requires_grad_("lora_" in name or name.startswith("head."))

    def forward(self, ids):
        x = self.emb(ids) + self.pos[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
