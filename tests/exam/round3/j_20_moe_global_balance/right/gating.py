import torch
import torch.distributed as dist
import torch.nn as nn


class NoisyGate(nn.Module):
    """Top-1 gate. The noise is handed in with the tokens, so it does not depend on the rank."""

    def __init__(self, dim, experts):
        super().__init__()
        self.lin = nn.Linear(dim, experts, bias=False)
        self.experts = experts

    def forward(self, x, noise, valid):
        logits = self.lin(x) + 0.3 * noise
        probs = logits.softmax(-1)
        top = probs.argmax(-1)
        gate = torch.nn.functional.one_hot(top, self.experts) * probs

        # counts over the tokens of all ranks: the balance is wanted for the global batch
        count = torch.zeros(self.experts).index_add_(0, top[valid], torch.ones(int(valid.sum())))
        dist.all_reduce(count)
        total = count.sum()
        share = count / total
        balance = self.experts * (share * probs[valid].sum(0)).sum() / total
        z = logits[valid].logsumexp(-1).square().sum() / total
        return gate, balance, z
