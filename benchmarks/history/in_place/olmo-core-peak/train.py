"""Trains a small language model with OLMo-core and a cosine schedule, from the newest checkpoint of a folder where asked to."""

import argparse
from pathlib import Path

import torch
from olmo_core.data import MemMapDatasetConfig
from olmo_core.distributed.parallel import DataParallelConfig, DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import (
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
from olmo_core.train.utils import Duration, DurationUnit
from olmo_core.utils import get_default_device

LENGTH = 32
HERE = Path(__file__).resolve().parent


def main(args):
    folder = args.ckpt or str(HERE / "run")
    model = TransformerConfig.llama_like(
        d_model=32,
        vocab_size=50304,  # a little bigger than actual vocab size to make it a multiple of 128
        n_layers=2,
        n_heads=2,
        hidden_size_multiple_of=32,
        dp_config=DataParallelConfig(name=DataParallelType.fsdp),
    ).build(init_device="meta", device=get_default_device())
    optim = AdamWConfig(lr=args.lr).build(model)
    dataset = MemMapDatasetConfig(
        paths=[str(HERE / "c4-train.00000-00099.npy")],
        sequence_length=LENGTH,
        eos_token_id=50256,
        pad_token_id=50256,
    ).build()
    trainer = (
        TrainerConfig(
            work_dir=str(HERE / "work"),
            save_folder=folder,
            global_batch_size=8,
            microbatch_size=4,
            save_overwrite=True,
            max_duration=Duration(value=args.steps, unit=DurationUnit.steps),
            metrics_collect_interval=1,
        )
        .with_callback(SchedulerCallback(scheduler=CosWithWarmup(warmup_steps=2)))
        .with_callback(GradClipperCallback(max_grad_norm=1.0))
        .with_callback(
            CheckpointerCallback(save_interval=args.save_every, pre_train_checkpoint=False)
        )
        .with_callback(ConsoleLoggerCallback(log_interval=1, metrics_log_interval=1))
        .build(model, optim, dataset)
    )
    if args.resume:
        trainer.load_checkpoint(folder)
    trainer.fit()
    trainer.thread_pool.shutdown()  # waits for the figures of the last step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--ckpt", help="folder of the checkpoints")
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    options = parser.parse_args()
    prepare_training_environment(
        seed=3423, backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    )
    try:
        main(options)
    finally:
        teardown_training_environment()
