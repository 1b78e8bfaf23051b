"""Deep embedded clustering of graph nodes in three phases: autoencoder, k-means for the centres, self-training."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from graph import block_graph
from kmeans import kmeans
from model import ClusterAutoencoder

CLUSTERS = 5


class Phases:
    def __init__(self, args):
        self.args = args
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(36)
        self.model = ClusterAutoencoder(clusters=CLUSTERS)
        fully_shard(self.model.encoder)
        fully_shard(self.model.decoder)
        fully_shard(self.model, reshard_after_forward=True)
        x, self.block = block_graph()
        self.mine = torch.arange(len(x)).tensor_split(world)[rank]
        self.x, self.nodes, self.world = x, len(x), world
        self.step = 0
        self.target = torch.zeros(len(x), CLUSTERS)
        self.optimizer = self.new_optimizer()

    @property
    def clustering(self):
        return self.step >= self.args.pretrain

    def new_optimizer(self):
        """Adam while pretraining, SGD with momentum for the self-training."""
        if self.clustering:
            return torch.optim.SGD(self.model.parameters(), lr=self.args.lr_cluster, momentum=0.9)
        weights = [p for n, p in self.model.named_parameters() if n != "centres"]
        return torch.optim.Adam(weights, lr=self.args.lr, eps=1e-6)

    @torch.no_grad()
    def begin_clustering(self):
        z = self.model(self.x[self.mine])[0]
        first = self.model(self.x[:40])[0][torch.arange(0, 40, 8)]
        centres = kmeans(z, CLUSTERS, first)
        local = self.model.centres.to_local()
        if local.numel():  # with more ranks than rows some hold nothing
            local.copy_(centres.chunk(self.world)[dist.get_rank()])
        self.optimizer = self.new_optimizer()

    @torch.no_grad()
    def refresh_target(self):
        """Sharpened assignments of all nodes; the cluster sizes are those of the whole graph."""
        q = torch.zeros(self.nodes, CLUSTERS)
        q[self.mine] = self.model(self.x[self.mine])[2]
        dist.all_reduce(q)
        weight = q.square() / q.sum(0)
        self.target = weight / weight.sum(1, keepdim=True)

    def train_step(self):
        if self.step == self.args.pretrain:
            self.begin_clustering()
        if self.clustering and (self.step - self.args.pretrain) % self.args.refresh == 0:
            self.refresh_target()
        # every node is in the batch; a rank's share is summed and divided by the number of all nodes
        x = self.x[self.mine]
        z, back, q = self.model(x)
        loss = F.mse_loss(back, x, reduction="sum") / self.x.shape[1]
        if self.clustering:
            loss = 0.2 * loss + F.kl_div(q.log(), self.target[self.mine], reduction="sum")
        loss = loss / self.nodes
        self.optimizer.zero_grad()
        (loss * self.world).backward()
        self.optimizer.step()
        self.step += 1
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item()

    def parts(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "target": self.target}

    def save(self, folder):
        dcp.save(self.parts(), checkpoint_id=os.path.join(folder, f"step-{self.step}"))

    def load(self, folder):
        self.step = max(int(name.split("-")[1]) for name in os.listdir(folder))
        if self.step > self.args.pretrain:
            self.optimizer = self.new_optimizer()
        else:  # saved at the last step of the pretraining, the optimizer is still its Adam
            self.step, step = 0, self.step
            self.optimizer = self.new_optimizer()
            self.step = step
        state = self.parts()
        dcp.load(state, checkpoint_id=os.path.join(folder, f"step-{self.step}"))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.target = state["target"]

    @torch.no_grad()
    def purity(self):
        chosen = self.model(self.x)[2].argmax(1)
        table = torch.zeros(CLUSTERS, CLUSTERS)
        table.index_put_((chosen, self.block), torch.ones(self.nodes), accumulate=True)
        return (table.max(1)[0].sum() / self.nodes).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--pretrain", type=int, default=16)
    parser.add_argument("--refresh", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--lr-cluster", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    phases = Phases(args)
    if args.resume:
        phases.load(args.resume)
    while phases.step < args.steps:
        loss = phases.train_step()
        if dist.get_rank() == 0 and phases.step % 4 == 0:
            print(f"step {phases.step} {'cluster' if phases.step > args.pretrain else 'pretrain'} loss {loss:.5f}", flush=True)
        if args.save_every and phases.step % args.save_every == 0:
            phases.save(args.save_dir)
    purity = phases.purity()
    if dist.get_rank() == 0:
        print(f"purity {purity:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
