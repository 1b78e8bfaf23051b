import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class MeanTeacher:
    """Exponential average of a student. Its weights are sharded like the student's."""

    def __init__(self, network, student, decay):
        self.decay = decay
        self.network = network.eval().requires_grad_(False)
        for layer in self.network.layers:
            fully_shard(layer)
        fully_shard(self.network)
        self.pairs = list(zip(self.network.parameters(), student.parameters()))

    @torch.no_grad()
    def targets(self, mel):
        """Targets of all frames, normalised over the channels."""
        y = self.network(mel)
        return F.layer_norm(y, y.shape[-1:])

    @torch.no_grad()
    def follow(self):
        for slow, fast in self.pairs:
            slow.lerp_(fast, 1 - self.decay)
