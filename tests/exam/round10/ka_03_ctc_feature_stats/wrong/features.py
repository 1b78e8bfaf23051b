import torch
import torch.nn as nn


class RunningCMVN(nn.Module):
    """Mean and variance normalisation of log-mel frames with statistics gathered during training."""

    def __init__(self, bins, momentum=0.2):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(bins))
        self.register_buffer("var", torch.ones(bins))

    @torch.no_grad()
    def observe(self, feats, lengths):
        valid = torch.arange(feats.size(1))[None, :] < lengths[:, None]
        frames = feats[valid].double()
        stats = torch.cat([frames.sum(0), (frames**2).sum(0), torch.tensor([float(len(frames))]).double()])
        bins = feats.size(-1)
        n = stats[-1]
        mean = stats[:bins] / n
        var = stats[bins : 2 * bins] / n - mean**2
        self.mean.lerp_(mean.float(), self.momentum)
        self.var.lerp_(var.float(), self.momentum)

    def forward(self, feats):
        return (feats - self.mean) / (self.var + 1e-5).sqrt()
