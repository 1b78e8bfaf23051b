import torch
import torch.nn.functional as F

from data import PROMPT


def completion_logp(model, ids):
    logits = model(ids[:, :-1])
    logp = F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logp[:, PROMPT - 1:].sum(1)


def dpo_loss(policy, reference, chosen, rejected, beta):
    both = torch.cat([chosen, rejected])
    with torch.no_grad():
        ref_c, ref_r = completion_logp(reference, both).chunk(2)
    pol_c, pol_r = completion_logp(policy, both).chunk(2)
    margin = beta * ((pol_c - ref_c) - (pol_r - ref_r))
    return -F.logsigmoid(margin).mean(), (margin > 0).float().mean()
