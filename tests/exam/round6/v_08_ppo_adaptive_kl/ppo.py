import torch
import torch.distributed as dist


def logp_of(logits, actions):
    return logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)


def full_kl(old_logits, new_logits):
    old, new = old_logits.log_softmax(-1), new_logits.log_softmax(-1)
    return (old.exp() * (old - new)).sum(-1)


class AdaptiveKL:
    """Coefficient of the KL penalty, raised when the policy moved too far in an update and lowered
    when it hardly moved."""

    def __init__(self, target, coef=1.0):
        self.target, self.coef = target, coef

    def update(self, kl):
        kl = kl.mean() / dist.get_world_size()
        dist.all_reduce(kl)
        if kl > 1.5 * self.target:
            self.coef *= 2.0
        elif kl < self.target / 1.5:
            self.coef /= 2.0


def surrogate(new_logits, batch, kl_coef):
    ratio = (logp_of(new_logits, batch["action"]) - batch["old_logp"]).exp()
    gain = ratio * batch["advantage"]
    return (kl_coef * full_kl(batch["old_logits"], new_logits) - gain).mean()
