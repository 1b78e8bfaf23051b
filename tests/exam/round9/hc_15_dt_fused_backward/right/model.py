import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class DecisionTransformer(nn.Module):
    """Tokens (return-to-go, state, action) per time step; predicts the action from the state token."""

    def __init__(self, obs=4, act=2, dim=32, depth=2, horizon=8):
        super().__init__()
        self.rtg, self.obs, self.act = nn.Linear(1, dim), nn.Linear(obs, dim), nn.Linear(act, dim)
        self.time = nn.Embedding(horizon, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, act)

    def forward(self, rtg, obs, act):
        b, t, _ = obs.shape
        time = self.time(torch.arange(t, device=obs.device))
        x = torch.stack([self.rtg(rtg) + time, self.obs(obs) + time, self.act(act) + time], 2).view(b, 3 * t, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 1::3]))
