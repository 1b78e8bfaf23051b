"""Trains a small language model with Lightning's ModelParallelStrategy (FSDP2); a single-file checkpoint after each epoch."""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

VOCAB, LENGTH, BATCH = 64, 32, 4


class Data(L.LightningDataModule):
    def train_dataloader(self):
        draw = torch.Generator().manual_seed(1)
        start = torch.randint(VOCAB, (24, 1), generator=draw)
        stride = torch.randint(1, 5, (24, 1), generator=draw)
        return DataLoader(
            TensorDataset((start + stride * torch.arange(LENGTH)) % VOCAB), batch_size=BATCH
        )


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (
            it.unflatten(-1, (4, -1)).transpose(1, 2) for it in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Model(L.LightningModule):
    def __init__(self, lr: float = 3e-3, backend: str = "inductor"):
        super().__init__()
        self.lr, self.backend = lr, backend
        self.network = Network()
        self.sharded = False

    def configure_model(self):
        if self.sharded:
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)
        self.network = torch.compile(self.network, backend=self.backend)
        self.sharded = True

    def forward(self, ids):
        return self.network(ids)

    def training_step(self, batch, _):
        (ids,) = batch
        loss = F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        shown = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item()
        self.print(f"step {self.global_step + 1} loss {shown:.6f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--ckpt", type=Path, help="folder for a checkpoint after each epoch")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --ckpt"
    )
    args = parser.parse_args()

    L.seed_everything(0)
    saving = (
        [ModelCheckpoint(args.ckpt, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)]
        if args.ckpt
        else []
    )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    strategy = ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else ranks,
        strategy=strategy,
        max_epochs=args.epochs,
        callbacks=saving,
        enable_checkpointing=bool(saving),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    newest = None
    if args.resume and args.ckpt:
        newest = max(
            args.ckpt.glob("epoch=*.ckpt"), key=lambda it: int(it.stem.split("=")[1]), default=None
        )
    trainer.fit(Model(backend=args.backend), Data(), ckpt_path=newest)


if __name__ == "__main__":
    main()
