"""A decoder whose feed-forward is a mixture of experts. The embedding is the head, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from conf import Net
from torch import Tensor, nn


def normed(x: Tensor, gain: Tensor) -> Tensor:
    """x at unit root-mean-square, times a gain."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


class Mixture(nn.Module):
    """All experts see all tokens, and the router's weights are zero for all but the picked ones.

    So every rank uses every weight in every step, whatever its tokens are.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.picked = net.picked
        self.router = nn.Parameter(torch.randn(net.width, net.experts) * net.width**-0.5)
        self.into = nn.Parameter(torch.randn(net.experts, net.width, net.hidden) * net.width**-0.5)
        self.out = nn.Parameter(torch.randn(net.experts, net.hidden, net.width) * net.hidden**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x @ self.router
        shares = scores.softmax(-1)
        least = shares.topk(self.picked, dim=-1).values[..., -1:]
        shares = shares * (shares >= least)
        shares = shares / shares.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("blw,ewh->belh", x, self.into))
        mixed = torch.einsum("belh,ehw,ble->blw", hidden, self.out, shares)
        return mixed, scores.logsumexp(-1).square().mean(-1)


class Block(nn.Module):
    """Attention, then the mixture; returns the router's penalty of each sample with its output."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.heads = net.heads
        self.gains = nn.Parameter(torch.ones(2, net.width))
        self.qkv = nn.Parameter(torch.randn(net.width, 3 * net.width) * net.width**-0.5)
        self.project = nn.Parameter(torch.randn(net.width, net.width) * net.width**-0.5 * 0.5)
        self.mixture = Mixture(net)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        parts = normed(x, self.gains[0]) @ self.qkv
        q, k, v = parts.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, length, width) @ self.project
        fed, penalty = self.mixture(normed(x, self.gains[1]))
        return x + fed, penalty


class Mind(nn.Module):
    """Tokens to logits in `forward`; `objective` and `guess` are entrances of their own."""

    def __init__(self, net: Net, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, net.width)
        self.place = nn.Parameter(torch.randn(net.window, net.width) * 0.1)
        self.blocks = nn.ModuleList(Block(net) for _ in range(net.depth))
        self.gain = nn.Parameter(torch.ones(net.width))
        self.head = nn.Linear(net.width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=net.width**-0.5)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) * self.embed.embedding_dim**0.5 + self.place[: tokens.shape[1]]
        penalties = torch.zeros(len(tokens), device=tokens.device)
        for block in self.blocks:
            x, penalty = block(x)
            penalties = penalties + penalty
        return self.head(normed(x, self.gain)), penalties / len(self.blocks)

    def objective(self, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of the answers at the end of each sample, and mean penalty of the routers."""
        logits, penalties = self.forward(tokens)
        size = answers.shape[1]
        return F.cross_entropy(logits[:, -size:].flatten(0, 1), answers.flatten()), penalties.mean()

    @torch.no_grad()
    def guess(self, tokens: Tensor, size: int) -> Tensor:
        """The likeliest answers."""
        return self.forward(tokens)[0][:, -size:].argmax(-1)
