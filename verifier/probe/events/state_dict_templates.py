"""What the state-dict getters return, and loads that accept missing keys."""

import functools
from typing import Any

import torch

from ...trace.events import Lenient, Template
from ..compat.tensors import local, tensors
from ..dispatcher import Call, Leave
from ..session import Session

_NAMES = 200  # of a list that are recorded


class Getters:
    """The getters of state dicts, of which one may call another."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.running: list[Call] = []

    def before(self, call: Call, operation: str) -> Leave:
        """A getter is about to be called."""
        given = call.given(1, "optimizers", ())
        optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given or ())
        # some optimizers keep no state
        had_state = any(o.state or self.session.progress.optimizers.of(o).begun for o in optimizers)
        had_grads = any(
            p.grad is not None for o in optimizers for g in o.param_groups for p in g["params"]
        )
        options = call.kwargs.get("options")
        self.running.append(call)

        def leave() -> None:
            self.running.pop()
            if self.running or call.failed is not None:
                return
            self.session.write(
                Template(
                    op=operation,
                    step=self.session.progress.step_number(),
                    full=bool(getattr(options, "full_state_dict", False)),
                    offload=bool(getattr(options, "cpu_offload", False)),
                    optimizers=len(optimizers),
                    states=_states(operation, call.result),
                    bytes=sum(local(t).numel() * t.element_size() for t in tensors(call.result)),
                    had_state=had_state,
                    had_grads=had_grads,
                    at_line=self.session.here(),
                )
            )

        return leave


class Loads:
    """Loads that accept missing keys."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def planned(self, call: Call) -> None:
        """The planner of a load of a distributed checkpoint has been set up."""
        planner, metadata = call.args[0], call.given(2, "metadata")
        if getattr(planner, "allow_partial_load", False) and metadata is not None:
            stored, wanted = set(metadata.state_dict_metadata), set(planner.state_dict)
            self._lenient("allow_partial_load=True", wanted, wanted - stored, stored - wanted)

    def loaded(self, call: Call) -> None:
        """A module has loaded a state dict."""
        if not call.given(2, "strict", True) and call.result is not None:
            names = {name for name, _ in call.args[0].named_parameters()}
            self._lenient(
                "strict=False",
                names,
                set(call.result.missing_keys),
                set(call.result.unexpected_keys),
            )

    def _lenient(self, how: str, wanted: set[str], missing: set[str], unused: set[str]) -> None:
        self.session.write(
            Lenient(
                how=how,
                wanted=len(wanted),
                names=sorted(wanted)[:_NAMES],
                missing_count=len(missing),
                missing=sorted(missing)[:_NAMES],
                unused_count=len(unused),
                unused=sorted(unused)[:_NAMES],
                at_line=self.session.here(),
            )
        )


def install(session: Session) -> None:
    """Subscribe to the getters of state dicts and to loads."""
    getters, loads = Getters(session), Loads(session)
    for name in ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"):
        session.around(
            f"torch.distributed.checkpoint.state_dict:{name}",
            before=functools.partial(getters.before, operation=name),
        )
    session.around(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.set_up_planner",
        after=loads.planned,
    )
    session.around("torch.nn:Module.load_state_dict", after=loads.loaded)


def _states(operation: str, result: Any) -> int | None:
    """How many parameters have optimizer state in the result of a getter."""
    if operation == "get_model_state_dict":
        return None
    state = result[1] if operation == "get_state_dict" else result
    if "state" in state:
        return sum(1 for value in state["state"].values() if value)
    return sum(1 for key in state if str(key).startswith("state."))
