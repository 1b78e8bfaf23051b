"""What a model needs of a device's peak in a step: the MFU of a project, by its spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...verifier.analysis.roofline import Ideal

if TYPE_CHECKING:
    from ...verifier.config.devices import Device
    from ..spec import Spec

PALM = "6N + 12LHQT a token, as the project counts"
PARAMETERS = "6N a token, as the project counts"


def ideal(spec: Spec, parameters: int, ranks: int, gpu: Device) -> Ideal | None:
    """How long a step lasts at the peak of all GPUs, as the project counts it; None for samples
    that are no sequences.

    `parameters`: those of the model that was run.
    """
    if (tokens := spec.tokens_per_step) is None:
        return None
    given = spec["operation"]["peak_tflops"]
    # of float32 without TF32, as in the project
    peak = given * 1e12 if given is not None else gpu.flops.get(spec["precision"]["param_dtype"])
    if not peak:
        return None
    counts = PALM if spec["model"]["kind"] == "decoder" else PARAMETERS
    return Ideal(tokens * per_token(spec, parameters) / (ranks * peak), counts)


def per_token(spec: Spec, parameters: int) -> float:
    """FLOPs of a token, forward and backward, as `flops_per_sample` of the project counts them
    (templates/flops.py.j2).
    """
    model = spec["model"]
    if model["kind"] != "decoder":
        return 6.0 * parameters
    layers, width = int(model["layers"]), int(model["width"])
    if not model["tied_embeddings"]:
        parameters -= model["vocabulary"] * width
    if experts := model.get("experts"):
        idle = experts["number"] - experts["top_k"]
        parameters -= (layers - experts["first_dense"]) * 3 * width * experts["ffn"] * idle
    attention = 12.0 * layers * width * int(model["sequence_length"])
    return 6.0 * parameters + attention
