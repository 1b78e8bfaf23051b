"""Trains a small language model with OLMo-core and saves it now and then; a restart goes on from the newest checkpoint of the run."""

import argparse
from pathlib import Path

import torch
from olmo_core.data import (
    NumpyDataLoaderConfig,
    NumpyDatasetConfig,
    NumpyDatasetType,
    TokenizerConfig,
)
from olmo_core.distributed.parallel import DataParallelConfig, DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import (
    Duration,
    LoadStrategy,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import (
    CheckpointerCallback,
    ConsoleLoggerCallback,
    GradClipperCallback,
    SchedulerCallback,
)
from olmo_core.utils import get_default_device, seed_all

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
        dp_config=DataParallelConfig(name=DataParallelType.fsdp),
    ).build(init_device="meta", device=get_default_device(), max_seq_len=LENGTH)
    optim = AdamWConfig(lr=1e-2).build(model)
    dataset = NumpyDatasetConfig(
        paths=[str(HERE / "c4-train.00000-00099.npy")],
        name=NumpyDatasetType.fsl,
        sequence_length=LENGTH,
        tokenizer=tokenizer,
        work_dir=str(HERE / "work"),
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=4 * LENGTH, seed=0, num_workers=0).build(
        dataset
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
        .with_callback("lr_scheduler", SchedulerCallback(scheduler=CosWithWarmup(warmup_steps=2)))
        .with_callback("grad_clipper", GradClipperCallback(max_grad_norm=1.0))
        .with_callback(
            "checkpointer",
            CheckpointerCallback(
                save_interval=args.save_every, pre_train_checkpoint=False, save_async=False
            ),
        )
        .with_callback("console_logger", ConsoleLoggerCallback(log_interval=1, metrics_log_interval=1))
        .build(model, optim, loader)
    )
    trainer.fit()
    trainer.thread_pool.shutdown()  # waits for the figures of the last step


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
