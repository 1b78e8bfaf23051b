"""Train what a YAML file describes: torchrun --standalone --nproc-per-node 2 main.py configs/tiny.yaml --workdir out"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import models  # noqa: F401  registers what a configuration can name
import torch
import yaml
from core.callbacks import Callback
from core.cluster import Cluster
from core.data import EpochLoader
from core.registry import CALLBACKS, DATASETS, MODELS, TASKS
from core.trainer import Trainer


def read(argv: list[str] | None = None) -> tuple[dict[str, Any], argparse.Namespace]:
    """The configuration with the changes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--workdir", default="out")
    parser.add_argument("--resume", default="", help="a checkpoint's name, or auto")
    parser.add_argument("--every", type=int, help="steps between checkpoints")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args(argv)
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    for change in options.set:
        path, _, text = change.partition("=")
        *sections, key = path.split(".")
        part = config
        for section in sections:
            part = part[section]
        part[key] = yaml.safe_load(text)
    return config, options


def build_callbacks(config: dict[str, Any], options: argparse.Namespace) -> list[Callback]:
    """The callbacks in the order of the file; those that write get the working folder."""
    built = []
    for section in config["callbacks"]:
        more: dict[str, Any] = {}
        if section["name"] in ("checkpoint", "export"):
            more["workdir"] = options.workdir
        if section["name"] == "checkpoint":
            more["resume"] = options.resume
            section = {**section, "every": options.every or section["every"]}
        built.append(CALLBACKS.build(section, **more))
    return built


def main() -> None:
    """Build everything, train, leave."""
    config, options = read()
    cluster = Cluster()
    torch.manual_seed(config["seed"])
    model = MODELS.build(config["model"])
    data = EpochLoader(
        DATASETS.build(config["dataset"]), cluster.rank, cluster.size, seed=config["seed"], **config["loader"]
    )
    trainer = Trainer(config, cluster, model, TASKS.build(config["task"]), data, build_callbacks(config, options))
    trainer.fit()
    cluster.close()


if __name__ == "__main__":
    main()
