"""Trains a small language model on a stream of text with Lightning's ModelParallelStrategy (FSDP2); a checkpoint after each epoch."""

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
from torch.utils.data import DataLoader, IterableDataset

VOCAB, LENGTH, BATCH, BATCHES = 64, 32, 4, 3


class Stream(IterableDataset):
    """An endless stream; an epoch is the next `BATCHES` batches of it. Each rank reads its own part."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks, self.position = rank, ranks, 0

    def __iter__(self):
        for _ in range(BATCH * BATCHES):
            number = self.position * self.ranks + self.rank
            self.position += 1
            draw = torch.Generator().manual_seed(number)
            start, stride = (
                torch.randint(VOCAB, (1,), generator=draw),
                torch.randint(1, 5, (1,), generator=draw),
            )
            yield number, (start + stride * torch.arange(LENGTH)) % VOCAB


class Data(L.LightningDataModule):
    def setup(self, stage):
        self.stream = getattr(self, "stream", None) or Stream(
            self.trainer.global_rank, self.trainer.world_size
        )

    def train_dataloader(self):
        return DataLoader(self.stream, batch_size=BATCH)

    def state_dict(self):
        return {"position": self.stream.position}

    def load_state_dict(self, state):
        self.stream.position = state["position"]


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


class Model(L.LightningModule):
    def __init__(self, width: int = 32, depth: int = 2, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.sharded = False

    def configure_model(self):
        if self.sharded:
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)
        self.sharded = True

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch, _):
        numbers, ids = batch
        loss = F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        shown = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item()
        self.print(f"step {self.global_step + 1} loss {shown:.6f} samples {numbers.tolist()}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
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
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else int(os.environ.get("WORLD_SIZE", 1)),
        strategy=ModelParallelStrategy(
            data_parallel_size=int(os.environ.get("WORLD_SIZE", 1)), tensor_parallel_size=1
        ),
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
    trainer.fit(Model(), Data(), ckpt_path=newest)


if __name__ == "__main__":
    main()
