"""How the mesh, the batch, the model and the settings of FSDP must fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from .build import ffn_size
from .crosschecks import Values, counts_ranks, fault, needs
from .meshes import Mesh, verified
from .model import data_ranks
from .torch_versions import ASYNCHRONOUS, chosen

LAUNCH = ("launch.engines", "launch.nodes", "launch.devices_per_node")
MESH = ("parallel", "verify.nproc", *LAUNCH)  # the keys that decide the mesh of a verification
FP8_MULTIPLE = 16
INNER = ("parallel.tp", "parallel.cp")
TP_SIZES = ("heads", "kv_heads", "ffn", "vocabulary", "sequence_length")


def verification_mesh(values: Values) -> Mesh | None:
    """The mesh of `fsdp2 verify`; None if there is none, or a key that decides it is not valid."""
    if not all(key in values for key in MESH):
        return None
    return verified(values["parallel"], values["launch"], values["verify.nproc"])


def ranks_named(values: Values, mesh: Mesh) -> str:
    """`verify.nproc 2 (the default)`: the ranks of the verification as they read in a message."""
    derived = "" if values["verify.nproc"] != "auto" else " (the default)"
    return f"verify.nproc {mesh.ranks}{derived}"


def alike(values: Values) -> tuple[str, int]:
    """The dimension whose ranks read the same samples, and its size: tp and cp are not combined."""
    return next(
        ((dim, size) for dim in ("cp", "tp") if (size := values[f"parallel.{dim}"]) > 1), ("tp", 1)
    )


@needs(*MESH)
@counts_ranks
def mesh_is_world(values: Values, parallel: Any, nproc: Any, *_launch: Any) -> Iterator[Fault]:
    if verification_mesh(values) is not None:
        return
    shard, replicate = parallel["dp_shard"], parallel["dp_replicate"]
    ranks, (dim, size) = 2 if nproc == "auto" else nproc, alike(values)
    if shard == "auto":
        if ranks % replicate:
            yield fault(
                "parallel.dp_replicate",
                f"must divide {values.named('verify.nproc')}, found {replicate}",
            )
        elif ranks % (replicate * size):
            of = f" / dp_replicate {replicate}" if replicate > 1 else ""
            yield fault(
                f"parallel.{dim}", f"must divide {values.named('verify.nproc')}{of}, found {size}"
            )
        return
    by_inner = f" x {dim} {size}" if size > 1 else ""
    message = f"{shard} x dp_replicate {replicate}{by_inner} is {shard * replicate * size} ranks"
    if nproc == "auto":
        yield fault("parallel.dp_shard", f"{message}; a verification needs 2 or more: write auto")
    elif nproc > shard * replicate * size:
        yield fault(
            "parallel.dp_shard", f"{message}; {values.named('verify.nproc')} must not be more"
        )
    else:
        fewer = "no smaller mesh of this shape has that many; leave verify.nproc out"
        yield fault("parallel.dp_shard", f"{message}, {values.named('verify.nproc')}: {fewer}")


@needs("parallel.dp_shard", "parallel.dp_replicate", *INNER, "verify.nproc", "verify.reshard_to")
@counts_ranks
def mesh_fits_other_worlds(
    values: Values, shard: Any, replicate: int, _tp: int, _cp: int, nproc: Any, worlds: list[int]
) -> Iterator[Fault]:
    """A single rank always fits: there the mesh is left out.

    A dp_shard that is a number fits its own world only.
    """
    if shard != "auto":
        return
    dim, size = alike(values)
    if (mesh := verification_mesh(values)) is not None:
        replicate, size = mesh.dp_replicate, mesh.alike
    unit = replicate * size
    key, of = ("parallel.dp_replicate", replicate) if replicate > 1 else (f"parallel.{dim}", size)
    shown = f"{key} {of}" + (f" x {dim} {size}" if replicate > 1 and size > 1 else "")
    for number, world in enumerate(worlds):
        if world == 1 or world % unit == 0:
            continue
        if values.written("verify.reshard_to"):
            yield fault(
                "verify.reshard_to", f"must be a multiple of {shown}, found {world}", number
            )
        else:
            message = (
                f"{shown.partition(' ')[2]} does not divide {values.named('verify.reshard_to')}"
            )
            yield fault(key, f"{message}; set verify.reshard_to, for example to [1, {2 * unit}]")
            return


@needs("train.global_batch", "train.micro_batch", *INNER, "verify.nproc")
@counts_ranks
def batch_divides(
    values: Values, batch: int, micro: int, _tp: int, _cp: int, nproc: Any
) -> Iterator[Fault]:
    if (mesh := verification_mesh(values)) is None:
        return
    readers, named, (dim, _) = (
        data_ranks(mesh.ranks, mesh.alike),
        ranks_named(values, mesh),
        alike(values),
    )
    if batch % (micro * readers):
        by = named if mesh.alike == 1 else f"({named} / parallel.{dim} {mesh.alike})"
        of = f"{values.named('train.micro_batch')} x {by} = {micro * readers}"
        yield fault("train.global_batch", f"must be a multiple of {of}, found {batch}")


@needs(
    "train.global_batch",
    "train.micro_batch",
    "parallel.dp_shard",
    *INNER,
    "verify.nproc",
    "verify.reshard_to",
)
@counts_ranks
def batch_divides_in_other_worlds(
    values: Values,
    batch: int,
    micro: int,
    shard: Any,
    _tp: int,
    _cp: int,
    nproc: Any,
    worlds: list[int],
) -> Iterator[Fault]:
    mesh = verification_mesh(values)
    if mesh is None or batch % (micro * data_ranks(mesh.ranks, mesh.alike)):
        return
    (dim, _), size = alike(values), mesh.alike
    for number, world in enumerate(worlds):
        readers = data_ranks(world, size)
        if batch % (micro * readers) == 0:
            continue
        by = f"{world} ranks" if size == 1 else f"({world} ranks / parallel.{dim} {size})"
        of = f"{values.named('train.micro_batch')} x {by} = {micro * readers}"
        if values.written("verify.reshard_to"):
            message = f"needs train.global_batch to be a multiple of {of}, found {batch}"
            yield fault("verify.reshard_to", message, number)
        else:
            message = f"must be a multiple of {of}, found {batch}; or set verify.reshard_to"
            yield fault("train.global_batch", f"{message}, which is {worlds} by default")


@needs("model.kind", "parallel.tp")
def tensor_parallelism_has_a_plan(values: Values, kind: str, tp: int) -> Iterator[Fault]:
    if tp > 1 and kind == "import":
        message = (
            "must be 1 for model.kind import: the scaffold does not know how to split your matrices"
        )
        yield fault(
            "parallel.tp",
            f"{message}; call parallelize_module in your factory's project, or use a decoder",
        )


@needs("parallel.tp", *(f"model.{key}" for key in TP_SIZES))
def tensor_parallelism_divides(values: Values, tp: int, *sizes: Any) -> Iterator[Fault]:
    for key, size in zip(TP_SIZES, sizes, strict=True):
        if key == "ffn" and size == "auto":
            size = ffn_size(values["model.width"]) if "model.width" in values else tp
        if isinstance(size, int) and size % tp:
            yield fault("parallel.tp", f"must divide model.{key} {size}, found {tp}")
            return


@needs("parallel.reshard_after_forward", "parallel.dp_shard", "parallel.tp", "verify.nproc")
@counts_ranks
def reshard_divides(
    values: Values, written: Any, shard: Any, tp: int, nproc: Any
) -> Iterator[Fault]:
    key = "parallel.reshard_after_forward"
    if isinstance(written, bool):
        return
    if tp > 1:
        message = f"must be true or false with parallel.tp {tp}, found {written}"
        yield fault(key, f"{message} (torch makes the smaller mesh over the whole world)")
        return
    if (mesh := verification_mesh(values)) is None:
        return
    others = (
        values["verify.reshard_to"] if "verify.reshard_to" in values and shard == "auto" else ()
    )
    for world in (mesh.ranks, *others):
        shards = world // mesh.dp_replicate
        if world > 1 and world % mesh.dp_replicate == 0 and shards > 1 and shards % written:
            of = f"{shards} ranks that share a copy of the model on {world} ranks"
            yield fault(
                key,
                f"must divide the {of}, found {written}; set verify.nproc and verify.reshard_to",
            )
            return


@needs("memory.compile", "parallel.tp", "model.kind")
def compile_splits_the_decoder(
    values: Values, compiled: bool, tp: int, kind: str
) -> Iterator[Fault]:
    """Measured on torch 2.13.0, transformers 5.23: layers that are recomputed raise "Recomputed
    values for the following tensors have different metadata" (pytorch#166926).
    """
    if compiled and tp > 1 and kind == "transformers":
        yield fault(
            "memory.compile",
            f"must be false for model.kind transformers with parallel.tp {tp}: torch 2.13.0 takes"
            " another graph when a layer is recomputed",
        )


@needs("torch", "checkpoint.mode")
def asynchronous_needs_a_stager(values: Values, torch: str | None, mode: str) -> Iterator[Fault]:
    if mode != "sync" and (found := chosen(torch)) < ASYNCHRONOUS:
        least, version = (".".join(map(str, one)) for one in (ASYNCHRONOUS, found))
        yield fault(
            "checkpoint.mode",
            f"{mode} needs torch {least} or later; the project is for torch {version}",
        )


@needs("parallel.prefetch.backward", "parallel.reshard_after_forward")
def prefetch_gathers(values: Values, backward: int, reshard: Any) -> Iterator[Fault]:
    if backward and reshard is False:
        message = (
            "does nothing with parallel.reshard_after_forward: false (all blocks stay gathered"
            " until backward)"
        )
        yield fault("parallel.prefetch.backward", message)


@needs("optimizer.kind", "parallel.tp", "parallel.cpu_offload")
def muon_gathers_rows(values: Values, kind: str, tp: int, offload: bool) -> Iterator[Fault]:
    if kind == "muon" and tp > 1:
        yield fault(
            "parallel.tp",
            f"must be 1 for optimizer.kind muon, whose matrices are split by rows, found {tp}",
        )
    if kind == "muon" and offload:
        message = "must be false for optimizer.kind muon, whose matrices meet on the devices"
        yield fault("parallel.cpu_offload", message)


@needs(
    "optimizer.kind",
    *INNER,
    "parallel.ep",
    "parallel.cpu_offload",
    "checkpoint.mode",
    "finetune.kind",
)
def eight_bits_alone(values: Values, kind: str, *found: Any) -> Iterator[Fault]:
    """Blocks of a column-split matrix would be others; the rest was not run with moments of 8
    bits.
    """
    if kind != "adamw8bit":
        return
    allowed = {
        **dict.fromkeys((*INNER, "parallel.ep"), 1),
        "parallel.cpu_offload": False,
        "checkpoint.mode": "sync",
    }
    for (key, only), value in zip({**allowed, "finetune.kind": "full"}.items(), found, strict=True):
        if value != only:
            shown, wanted = str(value).lower(), str(only).lower()
            yield fault(key, f"must be {wanted} for optimizer.kind adamw8bit, found {shown}")


@needs("memory.chunked_loss", "model.kind")
def chunked_loss_knows_the_head(values: Values, chunked: bool, kind: str) -> Iterator[Fault]:
    if chunked and kind != "decoder":
        message = (
            f"must be false for model.kind {kind}: only the decoder computes its loss in its own"
            " forward"
        )
        yield fault("memory.chunked_loss", message)


@needs("precision.fp8", "precision.param_dtype", "parallel.tp")
def fp8_needs_bfloat16(values: Values, fp8: bool, dtype: str, tp: int) -> Iterator[Fault]:
    if fp8 and dtype != "bfloat16":
        message = "needs precision.param_dtype: bfloat16 (what is not in float8 computes in it)"
        yield fault("precision.fp8", message)
    elif fp8 and tp > 1:
        yield fault("precision.fp8", f"needs parallel.tp: 1, found {tp}")


@needs("precision.fp8", "model.width", "model.kv_heads", "model.heads", "model.ffn")
def fp8_divides(
    values: Values, fp8: bool, width: int, kv_heads: Any, heads: int, ffn: Any
) -> Iterator[Fault]:
    """float8 matrix multiplications need sizes that are multiples of 16."""
    kv_heads = heads if kv_heads == "auto" else kv_heads
    for key, size in (("width", width), ("kv_heads", width // heads * kv_heads), ("ffn", ffn)):
        if fp8 and isinstance(size, int) and size % FP8_MULTIPLE:
            what = f"{kv_heads} (matrices of {size} rows)" if key == "kv_heads" else str(size)
            yield fault(
                "precision.fp8", f"needs multiples of {FP8_MULTIPLE}: model.{key} is {what}"
            )
            return
