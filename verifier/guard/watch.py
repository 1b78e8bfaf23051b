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
from ..probe.dispatcher import Call, Leave
from ..probe.events.backward import BACKWARD
from ..probe.events.optimizers import by_state_dict_helper
from .context import Context
from .journal import SCHEMA
from .laws import Law
from .laws.gradients import Gradients
from .laws.hardware import Hardware
from .laws.losses import Losses
from .laws.replicas import Replicas
from .laws.resume import Resume
from .laws.samples import Samples
from .laws.training import Training
from .measured import Measured
from .settings import Settings
from .stopping import Stopping
from .worker import Worker

LONGEST_LINE = 2000  # characters of a line in which a logged number is looked for
_OTHERS = 3  # steps of another optimizer, without one of the lead, after which it is the lead
_DDP = "torch.nn.parallel:DistributedDataParallel.forward"


class Guard:
    """The guard of this process."""

    def __init__(self, settings: Settings) -> None:
        self.context = Context(settings)
        kinds: tuple[type[Law], ...] = (
            *(Replicas, Gradients, Training, Samples),
            *(Losses, Resume, Hardware),
        )
        self.laws = [kind(self.context) for kind in kinds]
        self.worker = Worker(self.context, self.laws, self._started)
        self.stopping = Stopping(self.context, self.worker)
        self.context.breached.append(self.stopping.breach)
        self.context.hand_over = self.worker.give
        self._lead: weakref.ref[Optimizer] | None = None
        self._others: Counter[int] = Counter()

    def install(self) -> None:
        """Watch this process from now on."""
        around = self.context.dispatcher.around
        around(ROOT_FORWARD, before=self._fsdp_forward)
        around(_DDP, before=self._ddp_forward)
        around(BACKWARD, before=self._backward)
        around("builtins:print", before=self._prints)
        around("logging:Logger.handle", before=self._logs)
        for law in self.laws:
            self.context.guarded(law.install)()
        self.context.dispatcher.install()
        register_optimizer_step_pre_hook(self.context.guarded(self._stepping))
        register_optimizer_step_post_hook(self.context.guarded(self._stepped))
        atexit.register(self.context.guarded(self.worker.finish))

    def _started(self) -> None:
        """The first step begins: write what runs."""
        context = self.context
        if context.rank == 0:
            context.journal.write(
                "start",
                schema=SCHEMA,
                world=context.world,
                torch=torch.__version__,
                argv=sys.argv,
                settings=context.settings.words(),
                restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                host=os.uname().nodename,
                step=context.base,
            )

    def _fsdp_forward(self, call: Call) -> None:
        state, module, args, kwargs = call.args
        if getattr(getattr(state, "_state_ctx", None), BEGUN_FORWARD, None) is None:
            self._forward(module, (args, kwargs))

    def _ddp_forward(self, call: Call) -> None:
        model = call.args[0]
        if not self.context.scene.replicated:
            self.context.scene.replicated = dist.get_process_group_ranks(model.process_group)
        self._forward(model.module, (call.args[1:], call.kwargs))

    def _forward(self, module: nn.Module, given: Any) -> None:
        self.context.beat = time.monotonic()
        if not (torch.is_grad_enabled() and module.training):
            return
        self.context.scene.adopt(module)
        samples = [one.detach() for one in tensors.tensors(given) if one.grad_fn is None]
        for law in self.laws:
            self.context.guarded(law.forward)(module, samples)

    def _backward(self, call: Call) -> Leave:
        self.context.beat = time.monotonic()
        given = call.given(0, "tensors")
        losses = [given] if isinstance(given, torch.Tensor) else list(given)
        for law in self.laws:
            self.context.guarded(law.backward)(losses)

        def ended() -> None:
            for law in self.laws:
                self.context.guarded(law.after_backward)()

        return ended

    def _prints(self, call: Call) -> None:
        # Tensors are left alone: to read one waits for its device.
        if self.context.rank == 0 and call.args:
            self._said(" ".join(str(one) for one in call.args if isinstance(one, str | float)))

    def _logs(self, call: Call) -> None:
        record = call.args[1]
        given = record.args if isinstance(record.args, tuple) else ()
        if self.context.rank == 0 and not any(isinstance(one, torch.Tensor) for one in given):
            self._said(record.getMessage())

    def _said(self, text: str) -> None:
        for read in self.context.printed if len(text) < LONGEST_LINE else ():
            read(text)

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if by_state_dict_helper():
            return
        self.context.scene.steps(optimizer)
        if self._lead is None or self._lead() is None:
            self._lead = weakref.ref(optimizer)
        if self.context.began is None:
            self.context.began = time.monotonic()
            self._take(Measured("begin", self.context.step), "begin")
        for law in self.laws:
            self.context.guarded(law.stepping)(optimizer, self.context.due)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if by_state_dict_helper():
            return
        self.context.beat = time.monotonic()
        lead = self._leads(optimizer)
        due = lead and self.context.due
        self.context.made += lead
        for law in self.laws:
            self.context.guarded(law.stepped)(lead)
        if due:
            self._take(Measured("check", self.context.step), "measure")
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
        self._lead = weakref.ref(optimizer)
        self.context.made += _OTHERS - 1
        self._others.clear()
        return True

    def _take(self, measured: Measured, how: str) -> None:
        with torch.no_grad(), tensors.own_tensors():
            for law in self.laws:
                self.context.guarded(getattr(law, how))(measured)
        self.worker.give(measured)
