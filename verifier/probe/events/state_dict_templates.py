"""What the state-dict getters return, and loads that accept missing keys."""

from typing import Any

import torch

from ...trace.events import Lenient, Template
from ..compat.tensors import local, tensors
from ..dispatcher import Call, Leave
from ..session import Session

_NAMES = 200  # of a list that are recorded


def install(session: Session) -> None:
    """Subscribe to the getters of state dicts, of which one may call another, and to loads."""
    running: list[Call] = []

    def watch(operation: str) -> None:
        def before(call: Call) -> Leave:
            given = call.given(1, "optimizers", ())
            optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given or ())
            had_state = any(
                o.state or session.optimizers.of(o).begun for o in optimizers
            )  # some keep none
            had_grads = any(
                p.grad is not None for o in optimizers for g in o.param_groups for p in g["params"]
            )
            options = call.kwargs.get("options")
            running.append(call)

            def leave() -> None:
                running.pop()
                if running or call.failed is not None:
                    return
                session.write(
                    Template(
                        op=operation,
                        step=session.step_number(),
                        full=bool(getattr(options, "full_state_dict", False)),
                        offload=bool(getattr(options, "cpu_offload", False)),
                        optimizers=len(optimizers),
                        states=_states(operation, call.result),
                        bytes=sum(
                            local(t).numel() * t.element_size() for t in tensors(call.result)
                        ),
                        had_state=had_state,
                        had_grads=had_grads,
                        at_line=session.here(),
                    )
                )

            return leave

        session.around(f"torch.distributed.checkpoint.state_dict:{operation}", before=before)

    def planned(call: Call) -> None:
        planner, metadata = call.args[0], call.given(2, "metadata")
        if getattr(planner, "allow_partial_load", False) and metadata is not None:
            stored, wanted = set(metadata.state_dict_metadata), set(planner.state_dict)
            lenient("allow_partial_load=True", wanted, wanted - stored, stored - wanted)

    def loaded(call: Call) -> None:
        if not call.given(2, "strict", True) and call.result is not None:
            names = {name for name, _ in call.args[0].named_parameters()}
            lenient(
                "strict=False",
                names,
                set(call.result.missing_keys),
                set(call.result.unexpected_keys),
            )

    def lenient(how: str, wanted: set[str], missing: set[str], unused: set[str]) -> None:
        session.write(
            Lenient(
                how=how,
                wanted=len(wanted),
                names=sorted(wanted)[:_NAMES],
                missing_count=len(missing),
                missing=sorted(missing)[:_NAMES],
                unused_count=len(unused),
                unused=sorted(unused)[:_NAMES],
                at_line=session.here(),
            )
        )

    for name in ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"):
        watch(name)
    session.around(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.set_up_planner",
        after=planned,
    )
    session.around("torch.nn:Module.load_state_dict", after=loaded)


def _states(operation: str, result: Any) -> int | None:
    """How many parameters have optimizer state in the result of a getter."""
    if operation == "get_model_state_dict":
        return None
    state = result[1] if operation == "get_state_dict" else result
    if "state" in state:
        return sum(1 for value in state["state"].values() if value)
    return sum(1 for key in state if str(key).startswith("state."))
