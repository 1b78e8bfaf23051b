import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, PROMPT, ANSWER = 12, 3, 6


class Policy(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, dim)
        self.pos = nn.Embedding(PROMPT + ANSWER, dim)
        self.proj = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim, bias=False))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        q, k, v = self.proj(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x + self.mlp(x))


def answer_log_probs(policy, sequences):
    logits = policy(sequences[:, :-1])[:, PROMPT - 1:]
    return logits.log_softmax(-1).gather(-1, sequences[:, PROMPT:, None]).squeeze(-1)


@torch.no_grad()
def sample(policy, prompts, keys):
    """Gumbel sampling with a generator per sequence: the noise depends on the key alone."""
    noise = torch.stack([torch.rand(ANSWER, VOCAB, generator=torch.Generator().manual_seed(int(k))) for k in keys])
    gumbel = -(-noise.clamp(1e-9, 1 - 1e-7).log()).log()
    sequences = prompts
    for t in range(ANSWER):
        logits = policy(sequences)[:, -1]
        token = (logits + gumbel[:, t]).argmax(-1, keepdim=True)
        sequences = torch.cat([sequences, token], 1)
    return sequences


def reward(sequences):
    """Answers should count upwards from the sum of the prompt."""
    prompt, answer = sequences[:, :PROMPT], sequences[:, PROMPT:]
    goal = (prompt.sum(1, keepdim=True) + torch.arange(ANSWER)) % VOCAB
    hits = (answer == goal).float().mean(1)
    steps = ((answer[:, 1:] - answer[:, :-1]) % VOCAB == 1).float().mean(1)
    return hits + 0.5 * steps
