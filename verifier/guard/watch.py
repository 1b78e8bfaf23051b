"""The guard of one rank: sees steps, forwards and backwards, and lets the laws measure and judge.

The main thread only measures, and waits for nothing; a thread of the guard's own waits, compares
and writes.
"""

import atexit
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..probe.compat import tensors
from ..probe.compat.names import BEGUN_FORWARD, ROOT_FORWARD
from ..probe.dispatcher import Call, Dispatcher
from ..probe.events.backward import BACKWARD
from ..probe.events.optimizers import by_state_dict_helper
from ..probe.frames import Frames
from ..trace.origin import is_user
from .journal import SCHEMA, Breach, Journal
from .laws import Law
from .laws.hang import Hang
from .laws.hardware import Hardware
from .laws.losses import Losses
from .laws.replicas import Replicas
from .laws.resume import Resume
from .laws.samples import Samples
from .laws.training import Training
from .measured import Measured
from .scene import Scene
from .settings import Settings
from .stopping import Stopping
from .worker import Worker

_OTHERS = 3  # steps of another optimizer, without one of the lead, after which it is the lead
_DDP = "torch.nn.parallel:DistributedDataParallel.forward"


class Guard:
    """The guard of this process."""

    def __init__(self, settings: Settings) -> None:
        script = Path(sys.argv[0] or ".").resolve()
        self.settings = settings
        self.scene = Scene()
        self.frames = Frames(str(script.parent))
        self.journal = Journal(settings.out, int(os.environ.get("RANK", "0")), settings.hook)
        self.dispatcher = Dispatcher(self.journal.error)
        self.base = 0  # steps before this process, of a run that was resumed
        self.made = 0  # in this process
        self.process = os.getpid()
        self.beat = time.monotonic()  # when the training last showed a sign
        self.began = False
        self.begun = self.beat  # when the first step began
        self.replicas, self.resume = Replicas(self), Resume(self)
        self.samples, self.losses = Samples(self), Losses(self)
        self.laws: tuple[Law, ...] = (
            self.replicas,
            Training(self),
            self.samples,
            self.losses,
            self.resume,
            Hardware(self),
        )
        self.worker = Worker(self, Hang(self))
        self.stopping = Stopping(self)
        self._lead: weakref.ref[Optimizer] | None = None
        self._others: Counter[int] = Counter()

    @property
    def step(self) -> int:
        """The steps that the run has made, with those before a resume."""
        return self.base + self.made

    @property
    def first_check(self) -> int:
        """The step of the first check."""
        return self.base + 1

    def install(self) -> None:
        """Watch this process from now on."""
        around = self.dispatcher.around
        around(ROOT_FORWARD, before=self._fsdp_forward)
        around(_DDP, before=self._ddp_forward)
        around(BACKWARD, before=self._backward)
        for law in self.laws:
            self.guarded(law.install)()
        self.dispatcher.install()
        register_optimizer_step_pre_hook(self.guarded(self._stepping))
        register_optimizer_step_post_hook(self.guarded(self._stepped))
        atexit.register(self.guarded(self.worker.finish))

    def started(self, rank: int, world: int) -> None:
        """The first step begins: write what runs."""
        self.journal.rank = rank
        if rank == 0:
            self.journal.write(
                "start",
                schema=SCHEMA,
                world=world,
                torch=torch.__version__,
                argv=sys.argv,
                settings=self.settings.words(),
                restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                host=os.uname().nodename,
                step=self.base,
            )

    def due(self) -> bool:
        """Whether the next step is checked."""
        return self.made == 0 or (self.step + 1) % self.settings.every == 0

    def here(self) -> str:
        """file:line of the user's code that is running."""
        place = self.frames.here()
        return f"{os.path.relpath(place.file)}:{place.line}" if place is not None else ""

    def verify_command(self, options: str = "") -> str:
        """The command with which the verifier shows a fault small."""
        script, arguments = sys.argv[0], " ".join(sys.argv[1:])
        if not is_user(str(Path(script).resolve())):
            return ""
        rest = f" -- {arguments}" if arguments else ""
        return f"fsdp2 verify {script}{f' {options}' if options else ''}{rest}"

    def _fsdp_forward(self, call: Call) -> None:
        state, module, args, kwargs = call.args
        if getattr(getattr(state, "_state_ctx", None), BEGUN_FORWARD, None) is None:
            self._forward(module, (args, kwargs))

    def _ddp_forward(self, call: Call) -> None:
        model = call.args[0]
        if not self.scene.replicated:
            self.scene.replicated = dist.get_process_group_ranks(model.process_group)
        self._forward(model.module, (call.args[1:], call.kwargs))

    def _forward(self, module: nn.Module, given: Any) -> None:
        self.beat = time.monotonic()
        if not (torch.is_grad_enabled() and module.training):
            return
        self.scene.adopt(module)
        samples = [one.detach() for one in tensors.tensors(given) if one.grad_fn is None]
        for law in self.laws:
            self.guarded(law.forward)(module, samples)

    def _backward(self, call: Call) -> None:
        self.beat = time.monotonic()
        given = call.given(0, "tensors")
        losses = [given] if isinstance(given, torch.Tensor) else list(given)
        for law in self.laws:
            self.guarded(law.backward)(losses)

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if by_state_dict_helper():
            return
        self.scene.steps(optimizer)
        if self._lead is None or self._lead() is None:
            self._lead = weakref.ref(optimizer)
        if not self.began:
            self.began, self.begun = True, time.monotonic()
            self._take(Measured("begin", self.step), "begin")
        for law in self.laws:
            self.guarded(law.stepping)(optimizer, self.due())

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if by_state_dict_helper():
            return
        self.beat = time.monotonic()
        lead = self._leads(optimizer)
        due = lead and self.due()
        self.made += lead
        for law in self.laws:
            self.guarded(law.stepped)(lead)
        if due:
            self._take(Measured("check", self.step), "measure")
        if lead:
            self.stopping.look(due)

    def _leads(self, optimizer: Optimizer) -> bool:
        """Whether the guard counts by the steps of this optimizer.

        One that was replaced (a warm-up with an optimizer of its own) steps no more.
        """
        lead = self._lead() if self._lead is not None else None
        if optimizer is lead:
            self._others.clear()
            return True
        self._others[id(optimizer)] += 1
        if self._others[id(optimizer)] < _OTHERS:
            return False
        self._lead, self.made = weakref.ref(optimizer), self.made + _OTHERS - 1
        self._others.clear()
        return True

    def _take(self, measured: Measured, how: str) -> None:
        with torch.no_grad(), tensors.own_tensors():
            for law in self.laws:
                self.guarded(getattr(law, how))(measured)
            measured.send()
        self.worker.give(measured)

    def save(self, measured: Measured) -> None:
        """Hand over what was measured at a save."""
        measured.send()
        self.worker.give(measured)

    def found(self, breach: Breach) -> None:
        """A breach: write it, and do what was asked for one."""
        if self.journal.breach(breach):
            self.stopping.breach(breach)

    def guarded(self, call: Callable[..., Any]) -> Callable[..., None]:
        """A function whose error is one line, and never the script's."""

        def called(*args: Any) -> None:
            try:
                call(*args)
            except Exception as error:
                self.journal.error(getattr(call, "__qualname__", str(call)), error)

        return called
