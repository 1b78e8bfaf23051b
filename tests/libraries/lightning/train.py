"""A decoder trained by Lightning's Trainer with ModelParallelStrategy: configure_model shards, the
Trainer does the rest.

save: --save {checkpoint} --save-after 3
resume: --resume {checkpoint}
"""

import argparse
import logging
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset

VOCAB, SEQ = 32, 16


class Sequences(Dataset):
    """The next token is 5 * token + 3 plus one random bit, modulo the vocabulary."""

    def __init__(self, samples):
        gen = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
        for _ in range(SEQ):
            tokens.append(
                (5 * tokens[-1] + 3 + torch.randint(0, 2, (samples,), generator=gen)) % VOCAB
            )
        self.tokens = torch.stack(tokens, dim=1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


class Decoder(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 32)
        self.positions = nn.Embedding(SEQ, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                32, 4, 64, dropout=dropout, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Model(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        torch.manual_seed(0)
        model = Decoder(self.args.dropout)
        mesh = self.device_mesh["data_parallel"]
        low = torch.bfloat16 if self.args.bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)

    def training_step(self, batch, index):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1).float(), targets.flatten())
        self.log("loss", loss, prog_bar=False)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=10)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class SaveOnce(L.Callback):
    def __init__(self, path, after):
        self.path, self.after, self.done = path, after, False

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == self.after and not self.done:
            self.done = True
            trainer.save_checkpoint(f"{self.path}/lightning.ckpt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--full", action="store_true", help="one file with the whole state")
    parser.add_argument(
        "--stateful", action="store_true", help="a data loader that knows where it is"
    )
    parser.add_argument("--save")
    parser.add_argument("--save-after", type=int, default=0)
    parser.add_argument("--resume")
    args = parser.parse_args()
    logging.getLogger("lightning").setLevel(logging.ERROR)

    world = int(os.environ.get("WORLD_SIZE", 1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ModelParallelStrategy(
            data_parallel_size=world,
            tensor_parallel_size=1,
            save_distributed_checkpoint=not args.full,
        ),
        max_steps=12,
        accumulate_grad_batches=args.accumulation,
        gradient_clip_val=args.clip,
        callbacks=[SaveOnce(args.save, args.save_after)] if args.save else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    kind = DataLoader
    if args.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    loader = kind(Sequences(512), batch_size=args.global_batch // world)
    trainer.fit(
        Model(args), loader, ckpt_path=f"{args.resume}/lightning.ckpt" if args.resume else None
    )


if __name__ == "__main__":
    main()
