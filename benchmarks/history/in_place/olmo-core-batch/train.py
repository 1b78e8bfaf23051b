"""Trains a small language model with OLMo-core: the batch grows after a few steps; a restart goes on from the newest checkpoint of the run."""

import argparse
from pathlib import Path

import torch
from olmo_core.data import (
    NumpyDataLoaderConfig,
    NumpyDatasetConfig,
    NumpyDatasetType,
    TokenizerConfig,
)
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, ConstantWithWarmup
from olmo_core.train import (
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import (
    BatchSizeSchedulerCallback,
    CheckpointerCallback,
    ConsoleLoggerCallback,
)
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig
from olmo_core.utils import seed_all

LENGTH = 32
HERE = Path(__file__).resolve().parent


def main(args):
    seed_all(0)
    tokenizer = TokenizerConfig.gpt2()
    model = TransformerConfig.llama_like(
        d_model=32,
        vocab_size=tokenizer.padded_vocab_size(),
        n_layers=2,
        n_heads=2,
        hidden_size_multiple_of=32,
    ).build(init_device="meta")
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        optim=AdamWConfig(lr=1e-3),
        scheduler=ConstantWithWarmup(warmup_steps=2),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp),
        max_grad_norm=1.0,
    ).build(model)
    dataset = NumpyDatasetConfig(
        paths=[str(HERE / "c4-train.00000-00099.npy")],
        name=NumpyDatasetType.fsl,
        sequence_length=LENGTH,
        tokenizer=tokenizer,
        work_dir=str(HERE / "work"),
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=4 * LENGTH, seed=0, num_workers=0).build(
        dataset, dp_process_group=train_module.dp_process_group
    )
    trainer = (
        TrainerConfig(
            save_folder=args.save_folder or str(HERE / "run"),
            save_overwrite=False,
            no_checkpoints=args.save_folder is None,
            metrics_collect_interval=1,
            max_duration=Duration.steps(args.steps),
        )
        .with_callback(
            "checkpointer", CheckpointerCallback(save_interval=args.save_every, save_async=False)
        )
        .with_callback("console", ConsoleLoggerCallback(log_interval=1, metrics_log_interval=1))
        .with_callback(
            "batch_size",
            BatchSizeSchedulerCallback(
                batch_sizes=[4 * LENGTH, 8 * LENGTH],
                schedule=[Duration.steps(0), Duration.steps(args.grow_at)],
            ),
        )
        .build(train_module, loader)
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--grow-at", type=int, default=2, help="step from which the batch has twice the size"
    )
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
