"""What the state-dict helpers give back, and loads that accept missing keys."""

from __future__ import annotations

from typing import Any

import torch

from ...trace.events import Lenient, Template
from ..compat.tensors import local, tensors
from ..dispatcher import Call, Leave
from ..session import Session

_NAMES = 200  # of a list that are recorded


def install(session: Session) -> None:
    """Subscribe to the getters of state dicts, and to loads."""
    depth = 0

    def watched(name: str) -> Any:
        def before(call: Call) -> Leave:
            nonlocal depth
            depth += 1
            record = _asked(session, name, call) if depth == 1 else None

            def leave() -> None:
                nonlocal depth
                depth -= 1
                if record is not None and call.failed is None:
                    session.write(record(call.result))

            return leave

        return before

    for name in ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"):
        session.dispatcher.around(f"torch.distributed.checkpoint.state_dict:{name}", before=watched(name))
    _watch_lenient_loads(session)


def _asked(session: Session, operation: str, call: Call) -> Any:
    """What makes the record of a getter's result; the state of the optimizers is that before the call."""
    given = call.given(1, "optimizers", ())
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given or ())
    had_state = any(o.state for o in optimizers)
    had_grads = any(p.grad is not None for o in optimizers for group in o.param_groups for p in group["params"])
    options = call.kwargs.get("options")

    def record(result: Any) -> Template:
        return Template(
            op=operation,
            step=session.step_number(),
            full=bool(getattr(options, "full_state_dict", False)),
            offload=bool(getattr(options, "cpu_offload", False)),
            optimizers=len(optimizers),
            states=_states(operation, result),
            bytes=sum(local(t).numel() * t.element_size() for t in tensors(result)),
            had_state=had_state,
            had_grads=had_grads,
            at_line=session.here(),
        )

    return record


def _states(operation: str, result: Any) -> int | None:
    """How many parameters have optimizer state in what a helper gave back."""
    if operation == "get_model_state_dict":
        return None
    state = result[1] if operation == "get_state_dict" else result
    if "state" in state:
        return sum(1 for value in state["state"].values() if value)
    return sum(1 for key in state if str(key).startswith("state."))


def _watch_lenient_loads(session: Session) -> None:
    def planned(call: Call) -> None:
        planner, metadata = call.args[0], call.given(2, "metadata")
        if getattr(planner, "allow_partial_load", False) and metadata is not None:
            stored, wanted = set(metadata.state_dict_metadata), set(planner.state_dict)
            _lenient(session, "allow_partial_load=True", wanted, wanted - stored, stored - wanted)

    def loaded(call: Call) -> None:
        if not call.given(2, "strict", True) and call.result is not None:
            names = {name for name, _ in call.args[0].named_parameters()}
            missing, unexpected = set(call.result.missing_keys), set(call.result.unexpected_keys)
            _lenient(session, "strict=False", names, missing, unexpected)

    planner = "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.set_up_planner"
    session.dispatcher.around(planner, after=planned)
    session.dispatcher.around("torch.nn:Module.load_state_dict", after=loaded)


def _lenient(session: Session, how: str, wanted: set[str], missing: set[str], unused: set[str]) -> None:
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
