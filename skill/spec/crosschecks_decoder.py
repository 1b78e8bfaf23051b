"""How the parts of the decoder that the scaffold writes must fit together, and what cannot be
combined with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from .build import ffn_size, sized_experts
from .crosschecks import Values, fault, needs
from .torch_versions import GROUPED_MM, chosen

ROW = 8  # values of bfloat16 in 16 bytes


@needs("model.experts", "model.layers")
def experts_fit_the_model(values: Values, experts: Any, layers: int) -> Iterator[Fault]:
    if experts is None:
        return
    number, top_k, dense = experts["number"], experts["top_k"], experts["first_dense"]
    if top_k > number:
        yield fault("model.experts", f"must be at most number {number}, found {top_k}", "top_k")
    if dense >= layers:
        message = (
            f"must be less than model.layers {layers} (no layer would have experts), found {dense}"
        )
        yield fault("model.experts", message, "first_dense")
    if dense == 0 and values.written("model.ffn") and experts["ffn"] != "auto":
        message = (
            "does nothing with model.experts: the size of an expert is experts.ffn, and first_dense"
            " is 0"
        )
        yield fault("model.ffn", message)


@needs("model.experts", "model.width", "model.ffn", "precision.param_dtype", "torch")
def experts_fill_rows(
    values: Values, experts: Any, width: int, ffn: Any, dtype: str, torch: str | None
) -> Iterator[Fault]:
    if experts is None or dtype != "bfloat16" or chosen(torch) < GROUPED_MM:
        return
    why = "for the grouped matrix product of model.experts in bfloat16"
    if width % ROW:
        yield fault("model.width", f"must be a multiple of {ROW} {why}, found {width}")
    size = sized_experts(experts, ffn_size(width) if ffn == "auto" else ffn)["ffn"]
    if size % ROW:
        yield fault("model.experts", f"must be a multiple of {ROW} {why}, found {size}", "ffn")


@needs("model.experts", "model.window", "checkpoint.export")
def experts_have_an_architecture(
    values: Values, experts: Any, window: int | None, export: Any
) -> Iterator[Fault]:
    """transformers: Glm4Moe has the same experts beside grouped attention, always a shared one, and
    no windows.
    """
    if experts is None or export != "huggingface":
        return
    if experts["shared"] == 0:
        why = "model.experts without shared ones, for which transformers has no architecture"
        yield fault("checkpoint.export", f"must be true or false with {why}, found 'huggingface'")
    if window is not None:
        why = "model.experts and model.window together, for which transformers has no architecture"
        yield fault("checkpoint.export", f"must be true or false with {why}, found 'huggingface'")


@needs("model.window", "model.full_attention_every", "model.sequence_length", "model.layers")
def window_limits_attention(
    values: Values, window: int | None, every: int | None, length: int, layers: int
) -> Iterator[Fault]:
    if window is not None and window >= length:
        yield fault(
            "model.window",
            f"must be less than model.sequence_length {length} to limit it, found {window}",
        )
    if every is not None and window is None:
        yield fault("model.full_attention_every", "does nothing without model.window")
    elif every is not None and every > layers:
        message = (
            f"must be at most model.layers {layers}, found {every}; leave it out for windows in all"
            " layers"
        )
        yield fault("model.full_attention_every", message)
