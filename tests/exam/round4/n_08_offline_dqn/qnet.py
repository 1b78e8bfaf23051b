import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class QNet(nn.Module):
    def __init__(self, obs=12, width=32, actions=4):
        super().__init__()
        self.l1, self.l2 = nn.Linear(obs, width), nn.Linear(width, width)
        self.value, self.adv = nn.Linear(width, 4), nn.Linear(width, actions)

    def forward(self, s):
        h = F.relu(self.l2(F.relu(self.l1(s))))
        adv = self.adv(h)
        return self.value(h).mean(1, keepdim=True) + adv - adv.mean(1, keepdim=True)


def sharded(mesh):
    net = QNet()
    fully_shard(net.l2, mesh=mesh)
    return fully_shard(net, mesh=mesh, reshard_after_forward=True)


def hard_update(target, online):
    target.load_state_dict(online.state_dict())
