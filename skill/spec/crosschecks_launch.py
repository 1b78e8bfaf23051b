"""Checks of the section `launch`: keys of engines that are off, keys that an engine needs, the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.problems import KeyPath, dotted
from ...verifier.config.reading.validation import Fault
from .crosschecks import Values, counts_ranks, fault, needs
from .crosschecks_parallel import INNER, LAUNCH, alike
from .meshes import shards

NEEDED = {
    "kubernetes_image": "container image that holds the project",
    "kubernetes_claim": "PersistentVolumeClaim for the checkpoints",
    "skypilot_volume": "SkyPilot volume for the checkpoints",
}
HOST = 63  # characters of one label of a host name


@needs("launch.engines")
def fits_together(values: Values, engines: list[str]) -> Iterator[Fault]:
    if engines:
        for check in (_of_other_engines, _missing, _kubernetes_name):
            yield from check(values)
    elif not values.written(
        "launch.engines"
    ):  # an explicit [] turns the section off, whatever else it holds
        for key in _written(values):
            yield fault(
                f"launch.{key}",
                "does nothing without launch.engines, for example [torchrun]",
                on_key=True,
            )


def _written(values: Values) -> list[str]:
    """The keys of the section that the file contains."""
    return [key for key in values["launch"] if key != "engines" and values.written(f"launch.{key}")]


def _of_other_engines(values: Values) -> Iterator[Fault]:
    engines = values["launch.engines"]
    for key in _written(values):
        engine = key.partition("_")[0]
        own = engine in ("slurm", "kubernetes", "skypilot") and not values.is_default(
            f"launch.{key}"
        )
        if own and engine not in engines:
            yield fault(
                f"launch.{key}", f"does nothing: launch.engines has no {engine}", on_key=True
            )
    gpu = values["launch.device"] == "cuda"
    if "skypilot" in engines and not gpu and values["launch.skypilot_accelerator"] is not None:
        yield fault(
            "launch.skypilot_accelerator", "does nothing with launch.device: cpu", on_key=True
        )


def _missing(values: Values) -> Iterator[Fault]:
    engines = values["launch.engines"]
    needed = dict(NEEDED)
    if values["launch.device"] == "cuda":
        needed["skypilot_accelerator"] = "GPU, for example H100 (or set launch.device: cpu)"
    for key, what in needed.items():
        engine = key.partition("_")[0]
        if engine in engines and f"launch.{key}" in values and values[f"launch.{key}"] is None:
            path = ("launch", key)
            yield Fault(
                path, f"{dotted(path)} is missing: {engine} needs the {what}", ("launch", "engines")
            )


@needs(*LAUNCH, "parallel.dp_shard", "parallel.dp_replicate", *INNER)
@counts_ranks
def ranks_make_the_mesh(
    values: Values,
    engines: list[str],
    nodes: int,
    devices: int,
    shard: Any,
    replicate: Any,
    *_inner: int,
) -> Iterator[Fault]:
    """The mesh and the global batch on the ranks of all nodes."""
    if not engines:
        return
    dim, size = alike(values)
    ranks = nodes * devices
    product = (
        f"{values.named('launch.nodes')} x {values.named('launch.devices_per_node')} = {ranks}"
        " ranks"
    )
    key = next(
        (key for key in ("launch.nodes", "launch.devices_per_node") if values.written(key)),
        "launch.engines",
    )
    at = tuple(key.split("."))
    if replicate == "auto":
        shard, replicate = "auto", shards(values["parallel"], values["launch"])
        fixed = f"copies of dp_shard {replicate}"
    else:
        fixed = f"parallel.dp_replicate {replicate}"
    fixed += f" x {dim} {size}" if size > 1 else ""
    if shard != "auto" and shard * replicate * size != ranks:
        mesh = (
            f"parallel.dp_shard {shard} x {fixed.removeprefix('parallel.')} ="
            f" {shard * replicate * size}"
        )
        yield Fault(at, f"{product} do not make the mesh: {mesh}", at)
    elif shard == "auto" and ranks % (replicate * size):
        yield Fault(at, f"{product} do not divide into {fixed}", at)
    yield from _batch_divides(values, at, product, max(ranks // size, 1))


def _batch_divides(values: Values, at: KeyPath, product: str, readers: int) -> Iterator[Fault]:
    """The global batch over the ranks that read samples of their own: those of a group of tp or cp
    read the same.
    """
    if "train.global_batch" not in values or "train.micro_batch" not in values:
        return
    batch, micro = values["train.global_batch"], values["train.micro_batch"]
    if batch % (micro * readers):
        share = f"{values.named('train.micro_batch')} x {readers} = {micro * readers}"
        message = f"{product}: train.global_batch {batch} is no multiple of {share}"
        yield Fault(at, message, at)


def _kubernetes_name(values: Values) -> Iterator[Fault]:
    """The first pod is NAME-node-0-0, a label of a host name."""
    if (
        "kubernetes" not in values["launch.engines"]
        or "name" not in values
        or "launch.nodes" not in values
    ):
        return
    name = values["name"]
    longest = HOST - len(f"-node-0-{values['launch.nodes'] - 1}")
    if name.endswith("-"):
        yield fault("name", "must end with a letter or a digit for launch.engines: kubernetes")
    elif len(name) > longest:
        message = (
            f"must have at most {longest} characters for launch.engines: kubernetes, found"
            f" {len(name)}"
        )
        yield fault("name", message)
