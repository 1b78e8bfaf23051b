import torch
import torch.nn.functional as F


def sequence_logp(lm, ids):
    logits = lm(ids[:, :-1])
    logp = F.log_softmax(logits, dim=-1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def dpo_loss(policy, ref, chosen, rejected, beta):
    both = torch.cat([chosen, rejected])
    pol_c, pol_r = sequence_logp(policy, both).chunk(2)
    with torch.no_grad():
        ref_c, ref_r = sequence_logp(ref, both).chunk(2)
    margin = beta * ((pol_c - ref_c) - (pol_r - ref_r))
    return -F.logsigmoid(margin).mean(), (margin > 0).float().mean()
