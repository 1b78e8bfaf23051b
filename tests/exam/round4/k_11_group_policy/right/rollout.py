"""Sampling of answers. Every sample has its own generator, so it does not matter which rank draws it."""
import torch


@torch.no_grad()
def rollout(model, prompts, sample_ids, step, new_tokens, temperature=1.0):
    model.eval()
    gens = [torch.Generator().manual_seed(1_000_003 * step + int(i)) for i in sample_ids]
    ids = prompts
    for _ in range(new_tokens):          # the same number of forwards on all ranks
        probs = torch.softmax(model(ids)[:, -1].float() / temperature, -1)
        nxt = torch.stack([torch.multinomial(p, 1, generator=g) for p, g in zip(probs, gens)])
        ids = torch.cat([ids, nxt], 1)
    model.train()
    return ids


def token_logp(model, ids, n_prompt):
    logits = model(ids[:, :-1])[:, n_prompt - 1:]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, n_prompt:, None]).squeeze(-1)
