import torch

VOCAB, PROMPT, ANSWER = 12, 3, 6


def prompts(iteration, n):
    g = torch.Generator().manual_seed(300 + iteration)
    return torch.randint(0, VOCAB, (n, PROMPT), generator=g)


def gumbel(iteration, index, group):
    """Noise belongs to a prompt, not to a rank: the same answers are drawn however the prompts are divided."""
    g = torch.Generator().manual_seed(1_000_000 + 1000 * iteration + index)
    u = torch.rand(group, ANSWER, VOCAB, generator=g).clamp(1e-6, 1 - 1e-6)
    return -torch.log(-torch.log(u))


@torch.no_grad()
def sample(policy, iteration, prompt, indices, group):
    ids = prompt.repeat_interleave(group, 0)
    noise = torch.cat([gumbel(iteration, int(i), group) for i in indices])
    for t in range(ANSWER):
        logits = policy(ids)[:, -1]
        ids = torch.cat([ids, (logits + noise[:, t]).argmax(-1, keepdim=True)], 1)
    return ids


def reward(ids):
    """Share of answer tokens that continue the count from the token before."""
    want = (ids[:, PROMPT - 1:-1] + 1) % VOCAB
    return (ids[:, PROMPT:] == want).float().mean(1)


def logp(policy, ids):
    out = policy(ids[:, :-1]).log_softmax(-1)
    return out.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, PROMPT - 1:]
