"""What the templates see of the sections `parallel`, `memory` and `precision`: what is on or off in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def parallel_context(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the template context that says which steps `parallelize` takes."""
    parallel, memory = values["parallel"], values["memory"]
    reshard, prefetch = parallel["reshard_after_forward"], parallel["prefetch"]
    ahead = prefetch["forward"] > 0 or prefetch["backward"] > 0
    return {
        "tp": parallel["tp"] > 1,
        "reshard_to_ranks": not isinstance(reshard, bool),
        "prefetch_forward": prefetch["forward"] > 0,
        "prefetch_backward": prefetch["backward"] > 0,
        "offload": parallel["cpu_offload"],
        "fp8": values["precision"]["fp8"],
        "checkpointing": memory["activation_checkpointing"] != "none",
        "op_selective": memory["activation_checkpointing"] == "op-selective",
        "model_settings": not isinstance(reshard, bool)
        or ahead
        or memory["activation_checkpointing"] in ("every-nth", "op-selective"),
        "collect": memory["gc_interval"] is not None,
    }
