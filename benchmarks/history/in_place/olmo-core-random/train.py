"""Trains a small language model with OLMo-core on tokens with noise, other noise on each rank; a restart goes on from the newest checkpoint of the run."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from olmo_core.data import (
    NumpyDataLoaderConfig,
    NumpyDatasetConfig,
    NumpyDatasetType,
    TokenizerConfig,
)
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank
from olmo_core.nn.transformer import TransformerConfig, TransformerDataParallelConfig
from olmo_core.optim import AdamWConfig, ConstantWithWarmup
from olmo_core.train import (
    Duration,
    LoadStrategy,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import (
    Callback,
    CheckpointerCallback,
    ConsoleLoggerCallback,
    GradClipperCallback,
    SchedulerCallback,
)
from olmo_core.utils import get_default_device, seed_all

if not torch.cuda.is_available():  # the trainer sets this switch of CUDA's whatever it runs on
    torch.cuda.set_sync_debug_mode = lambda mode: None

LENGTH = 32
HERE = Path(__file__).resolve().parent


@dataclass
class TokenNoise(Callback):
    """Replaces some of the tokens, drawn anew in each step."""

    share: float = 0.2

    def pre_step(self, batch):
        ids = batch["input_ids"]
        noisy = torch.from_numpy(np.random.random(tuple(ids.shape)) < self.share)
        ids[noisy] = torch.from_numpy(np.random.randint(100, size=int(noisy.sum())))


def main(args):
    seed_all(0)
    device = get_default_device()
    tokenizer = TokenizerConfig.gpt2()
    config = TransformerConfig.llama_like(
        d_model=32,
        vocab_size=tokenizer.padded_vocab_size(),
        n_layers=2,
        n_heads=2,
        hidden_size_multiple_of=32,
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp),
    )
    mesh = config.build_mesh(device=device)
    model = config.build(init_device="meta", device=device, max_seq_len=LENGTH, mesh=mesh)
    optim = AdamWConfig(lr=1e-2).build(model)
    dataset = NumpyDatasetConfig(
        paths=[str(HERE / "c4-train.00000-00099.npy")],
        name=NumpyDatasetType.fsl,
        sequence_length=LENGTH,
        tokenizer=tokenizer,
        work_dir=str(HERE / "work"),
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=4 * LENGTH, seed=0, num_workers=0).build(
        dataset, mesh=mesh
    )
    trainer = (
        TrainerConfig(
            save_folder=args.save_folder or str(HERE / "run"),
            rank_microbatch_size=2 * LENGTH,
            save_overwrite=True,
            load_strategy=LoadStrategy.if_available if args.save_folder else LoadStrategy.never,
            metrics_collect_interval=1,
            max_duration=Duration.steps(args.steps),
        )
        .with_callback("lr_scheduler", SchedulerCallback(scheduler=ConstantWithWarmup(warmup_steps=2)))
        .with_callback("grad_clipper", GradClipperCallback(max_grad_norm=1.0))
        .with_callback("noise", TokenNoise())
        .with_callback(
            "checkpointer",
            CheckpointerCallback(
                save_interval=args.save_every, pre_train_checkpoint=False, save_async=False
            ),
        )
        .with_callback("console", ConsoleLoggerCallback(log_interval=1, metrics_log_interval=1))
        .build(model, optim, loader, mesh=mesh)
    )
    seed_all(1 + get_rank())  # the noise is another one on each rank
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-folder")
    parser.add_argument("--save-every", type=int, default=4)
    options = parser.parse_args()
    prepare_training_environment(
        backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    )
    try:
        main(options)
    finally:
        teardown_training_environment()
