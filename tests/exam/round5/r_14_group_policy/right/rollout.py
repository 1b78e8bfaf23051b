import torch
import torch.nn.functional as F

from env import MAXLEN


@torch.no_grad()
def sample(actor, prompt, uniforms):
    """Inverse-transform sampling: `uniforms` [batch, MAXLEN] were drawn for the whole job, so that a prompt gets the same
    randomness on whichever rank it is. Every rank runs MAXLEN forwards (the collectives must match)."""
    n = len(prompt)
    tokens = torch.zeros(n, MAXLEN, dtype=torch.long)
    mask, alive = torch.zeros(n, MAXLEN), torch.ones(n, dtype=torch.bool)
    for t in range(MAXLEN):
        probs = actor(prompt, tokens)[:, t].softmax(-1)
        pick = (probs.cumsum(-1) < uniforms[:, t:t + 1]).sum(-1).clamp_max(probs.shape[-1] - 1)
        tokens[:, t] = torch.where(alive, pick, torch.zeros_like(pick))
        mask[:, t] = alive.float()
        alive = alive & (pick != 0)
    return tokens, mask


def logps(actor, prompt, tokens):
    return F.log_softmax(actor(prompt, tokens), -1).gather(-1, tokens[..., None]).squeeze(-1)
