import torch
import torch.distributed as dist

from players import Critic, Gen, shard
from source import latent, ring


class Game:
    """State of the two players; `draws` numbers every batch ever drawn."""

    def __init__(self, lr, clip, batch):
        torch.manual_seed(33)
        self.gen, self.critic = shard(Gen()), shard(Critic())
        self.og = torch.optim.RMSprop(self.gen.parameters(), lr=lr)
        self.oc = torch.optim.RMSprop(self.critic.parameters(), lr=lr)
        self.clip, self.batch, self.draws = clip, batch, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def _mine(self, fn):
        self.draws += 1
        return fn(self.draws, self.batch).chunk(self.world)[self.rank]

    def critic_step(self):
        with torch.no_grad():
            fake = self.gen(self._mine(latent))
        self.oc.zero_grad()
        loss = self.critic(fake) - self.critic(self._mine(ring))
        loss.backward()
        self.oc.step()
        with torch.no_grad():
            for p in self.critic.parameters():
                p.clamp_(-self.clip, self.clip)
        return loss.detach()

    def gen_step(self):
        self.og.zero_grad()
        loss = -self.critic(self.gen(self._mine(latent)))
        loss.backward()  # the critic's gradients of this pass are dropped by its zero_grad
        self.og.step()
        return loss.detach()

    @torch.no_grad()
    def distance(self):
        x = self.gen(latent(10**7, 256))
        return (x.mean(0) - ring(10**7, 256).mean(0)).norm().item()
