import torch


def gumbel(step, prompt_slot, sample, length, vocab):
    """Noise that belongs to one (step, prompt, sample), whichever process draws it."""
    g = torch.Generator().manual_seed(1_000_003 * step + 1009 * prompt_slot + sample)
    u = torch.rand(length, vocab, generator=g).clamp_min(1e-9)
    return -(-u.log()).log()


@torch.no_grad()
def generate(policy, prompts, noise, bos):
    """Sample one answer for each row; prompts [B], noise [B, T, V]."""
    batch, length, _ = noise.shape
    prev = torch.full((batch, 1), bos)
    for t in range(length):
        logits = policy(prompts, prev)[:, -1]
        token = (logits + noise[:, t]).argmax(-1, keepdim=True)
        prev = torch.cat([prev, token], dim=1)
    return prev[:, 1:]


def reward(prompts, tokens, vocab):
    want = (prompts[:, None] + torch.arange(tokens.shape[1])) % vocab
    hits = (tokens == want).float()
    # a bonus for a correct beginning makes the reward uneven between prompts
    return hits.mean(1) + 0.5 * hits[:, 0] * (prompts % 2)
