"""The training loop: hyperparameters, steps on real data, evaluation, logging, checkpoints, and an orderly end."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from ..base.device import one_thread
from ..base.errors import Diverged, UsageError
from ..base.option import Option, check_options, either
from ..models.workload import Batch
from ..training import gradients
from ..training.training import Training
from ..training.training_data import TrainingData
from .checkpoint.saver import Saved, Saver
from .checkpoint.state import State

if TYPE_CHECKING:
    import torch
    from torch import nn


LR_SCHEDULES = ("constant", "linear", "cosine", "wsd")
DEFAULT_LR = 1e-4


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters of the optimization, which do not depend on the configuration.

    Raises:
        UsageError: a value is out of its range.
    """

    steps: Annotated[int, Option("Optimizer steps in all.", type=int, least=1, metavar="N")] = 1000
    lr: Annotated[
        float | None, Option("Highest learning rate.  [default: 1e-4]", type=float, above=0, below=math.inf)
    ] = None
    """Highest learning rate; None for 1e-4, or for that of the workload's own optimizer."""
    lr_schedule: Annotated[
        str, Option(f"Learning-rate schedule: {either(LR_SCHEDULES)}.", choices=LR_SCHEDULES, in_file=True)
    ] = "cosine"
    """Schedule after the warm-up: `constant`, `linear`, `cosine`, or `wsd`: stable, then linear over the last `decay`."""
    lr_steps: Annotated[
        int | None,
        Option(
            "Steps after which the learning rate stays at its minimum.  [default: --steps, as first asked]",
            type=int,
            least=1,
            in_file=True,
        ),
    ] = None
    """Steps after which the learning rate stays at its minimum; None for all steps."""
    warmup: Annotated[int, Option("Warm-up steps; the first has lr/N.", type=int, least=0, in_file=True)] = 0
    """Warm-up steps, n: step k, counted from 1, has k/n of the highest rate. Transformers' Trainer counts from 0: its
    first step has a rate of 0, and every other step the rate of the previous step here.
    """
    min_lr: Annotated[
        float, Option("Minimum learning rate, as a share of the highest.", type=float, least=0, most=1, in_file=True)
    ] = 0.1
    decay: Annotated[
        float, Option("Share of the steps over which wsd falls.", type=float, above=0, most=1, in_file=True)
    ] = 0.2
    """Share of the steps over which `wsd` falls (arXiv:2404.06395)."""
    weight_decay: Annotated[
        float, Option("AdamW's weight decay, for weight matrices.", type=float, least=0, in_file=True)
    ] = 0.01
    """AdamW's weight decay for parameters with two dimensions or more; biases and norms have none."""
    betas: Annotated[
        tuple[float, float],
        Option("AdamW's decay rates of gradients and squared gradients.", type=float, least=0, below=1, in_file=True),
    ] = (0.9, 0.999)
    eps: Annotated[float, Option("AdamW's epsilon.", type=float, above=0, in_file=True)] = 1e-8
    clip: Annotated[
        float | None, Option("Largest global gradient norm; 0 for any.", type=float, least=0, in_file=True)
    ] = 1.0
    """Largest norm of all gradients together; None or 0 for no limit."""

    def __post_init__(self) -> None:
        check_options(self)
        if len(self.betas) != 2:
            raise UsageError(f"betas must be two numbers, but got {self.betas!r}")

    def lr_factor(self, step: int) -> float:
        """Learning rate of a step, numbered from 0, as a share of the highest."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        remaining = max(1, (self.lr_steps or self.steps) - self.warmup)
        done = min(1.0, (step - self.warmup) / remaining)
        if self.lr_schedule == "constant":
            share = 1.0
        elif self.lr_schedule == "linear":
            share = 1.0 - done
        elif self.lr_schedule == "cosine":
            share = (1.0 + math.cos(math.pi * done)) / 2
        else:
            share = min(1.0, (1.0 - done) / self.decay)
        return self.min_lr + (1.0 - self.min_lr) * share

    def optimizer(self, params: "Iterable[nn.Parameter]", fused: bool = False) -> "torch.optim.Optimizer":
        """AdamW, with weight decay for parameters with two dimensions or more."""
        import torch

        groups: dict[bool, list[nn.Parameter]] = {}
        for param in params:
            groups.setdefault(param.dim() >= 2, []).append(param)
        param_groups = [
            {"params": params_of_group, "weight_decay": self.weight_decay if decays else 0.0}
            for decays, params_of_group in groups.items()
        ]
        # Not fused leaves the choice to torch: foreach on CUDA, a loop over parameters on a CPU.
        return torch.optim.AdamW(
            param_groups,
            lr=self.lr if self.lr is not None else DEFAULT_LR,
            betas=self.betas,
            eps=self.eps,
            fused=True if fused else None,
        )


LAG = 2
"""Number of steps after which ranks read their common decision, so that none waits for the device."""


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """Actions of the loop apart from steps.

    Raises:
        UsageError: a value is out of its range.
    """

    log_every: Annotated[int, Option("Steps between two lines of the log.", type=int, least=1, in_file=True)] = 10
    eval_every: Annotated[
        int, Option("Steps between two evaluations on held-out samples; 0 for none.", type=int, least=0, metavar="N")
    ] = 0
    eval_steps: Annotated[
        int, Option("Largest number of global batches in an evaluation.", type=int, least=1, in_file=True)
    ] = 16
    save_every: Annotated[
        int, Option("Steps between two checkpoints; 0 for none by steps.", type=int, least=0, metavar="N")
    ] = 0
    save_minutes: Annotated[
        float, Option("Minutes between two checkpoints; 0 for none by time.", type=float, least=0, in_file=True)
    ] = 10.0
    keep: Annotated[int, Option("Number of checkpoints to keep.", type=int, least=1, in_file=True)] = 3

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopResult:
    """Result of the loop."""

    step: int
    stopped: bool
    """True if it was stopped before the last step."""
    failure: str = ""
    """Reason why the last step has no checkpoint; empty if it has one."""
    step_ms: float | None = None
    """Median time of a step over the intervals of the log except the first, ms; None if there was none."""
    samples_per_step: int = 0
    """Samples of one optimizer step over all ranks."""
    tokens_per_step: int | None = None
    """Tokens of one optimizer step; None if the data has no tokens."""
    tflops_per_device: float | None = None
    """Model FLOP/s per device, 1e12."""
    peak_memory_mib: float | None = None
    """This rank's peak, MiB."""


class HostCopy:
    """A copy of a tensor in host memory that is made while the device continues."""

    def __init__(self, tensor: "torch.Tensor") -> None:
        import torch

        self._values, self._done = tensor.to("cpu", non_blocking=True), None
        if tensor.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def tolist(self) -> list[float]:
        """The values; waits for the copy alone, and not for later work of the device."""
        if self._done is not None:
            self._done.synchronize()
        return self._values.tolist()


class Loop:
    """Trains from a step on, on every rank.

    The samples, their order and the learning rate depend only on the seed and the step, regardless of the configuration and
    the number of restarts. Dropout also depends on this rank's position.

    Args:
        training: model and optimizer, without its own data.
        samples: training data.
        saver: saver of checkpoints; None saves none.
        step, position: start: number of steps done, and of samples that they used.
        until: the step to end at; None for the last one.
        facts: description for the checkpoints' manifests.
        log: receives, on rank 0, the lines of the log: a `kind` and numbers by name.
        stop: returns True to stop; called on every rank at every step.
        peak_flops: peak FLOP/s of a device, for the utilisation; None if unknown.
        from_weights: frozen parameters that checkpoints leave out; see `State`.
    """

    def __init__(
        self,
        training: Training,
        samples: TrainingData,
        hyperparameters: Hyperparameters,
        plan: LoopPlan,
        *,
        saver: Saver | None = None,
        step: int = 0,
        position: int = 0,
        until: int | None = None,
        facts: Mapping[str, Any] | None = None,
        log: Callable[[Mapping[str, Any]], None] = lambda line: None,
        stop: Callable[[], bool] = lambda: False,
        memory_mib: Callable[[], float] | None = None,
        peak_flops: float | None = None,
        from_weights: Collection[str] = (),
    ) -> None:
        self.training, self.samples, self.plan, self.saver = training, samples, plan, saver
        self.step, self.position = step, position
        self._hyper = hyperparameters
        self.until = self._hyper.steps if until is None else until
        self._from_weights = from_weights
        self._facts = dict(facts or {})
        self._log = log if training.world.rank == 0 else lambda line: None
        self._stop, self._memory_mib, self._peak_flops = stop, memory_mib, peak_flops
        # Of the groups with a learning rate: some optimizers have none, or compute their own.
        self._lr = [
            (group, float(group["lr"])) for group in training.optimizer.param_groups if group.get("lr") is not None
        ]
        self._agreed: deque[HostCopy] = deque()
        self._losses: list[torch.Tensor] = []
        self._norm: torch.Tensor | None = None
        self._steady: list[float] = []
        self._loader = one_thread("data")
        self._saved_at, self._saved_step, self._kept_step = time.monotonic(), step, step
        self._begun, self._first, self._idle_s = time.perf_counter(), step, 0.0

    def run(self) -> LoopResult:
        """Trains until the last step, or until it is stopped; then saves.

        Raises:
            Diverged: the loss is not finite.
        """
        stopped = False
        self._begin_interval()
        following = self._fetch(self.step)
        try:
            while self.step < self.until and not stopped:
                share = following.result()
                following = self._fetch(self.step + 1)  # read while this step runs
                self._one(share)
                if self.saver is not None and self.step == self._first:
                    self._state().tensors()  # fails now rather than at the first checkpoint
                stopped, save = self._next_actions()
                self.step += 1
                is_last = self.step == self.until
                if self.step % self.plan.log_every == 0 or is_last or stopped:
                    self._report()
                if self.plan.eval_every and (self.step % self.plan.eval_every == 0 or is_last):
                    self._evaluate()
                if save or (self.plan.save_every and self.step % self.plan.save_every == 0):
                    self._save()
            return self._end(stopped)
        finally:
            following.cancel()
            self._loader.shutdown()

    def _fetch(self, step: int) -> "Future[Batch]":
        """Starts reading this replica's samples of a step, while another step runs."""
        position = self.position + (step - self._first) * self.training.samples_per_step
        return self.training.fetch(self._loader, self.samples, position)

    def _one(self, share: Batch) -> None:
        import torch

        training = self.training
        training.reseed(self.step)
        factor = self._hyper.lr_factor(self.step)
        for group, lr in self._lr:
            if isinstance(group["lr"], torch.Tensor):  # of a compiled or captured optimizer, which reads it in place
                group["lr"].fill_(lr * factor)
            else:
                group["lr"] = lr * factor
        self._losses.append(gradients.passes(training, self.samples, share).detach())
        training.update(self._clip)

    def _clip(self) -> None:
        """Clips gradients by their norm, and lets the ranks agree on the next actions."""
        import torch

        training = self.training
        due = training.world.rank == 0 and self.plan.save_minutes > 0
        save = due and time.monotonic() - self._saved_at >= 60 * self.plan.save_minutes
        if save:
            self._saved_at = time.monotonic()
        marks = torch.tensor([self._stop(), save], dtype=torch.float64).to(training.device, non_blocking=True)
        # One all-reduce for the norm and the flags, since a step waits for each collective.
        totals = torch.cat([gradients.square(training).reshape(1), marks])
        if training.world.size > 1:
            torch.distributed.all_reduce(totals)
        self._agreed.append(HostCopy(totals[1:]))
        self._norm = totals[0].sqrt()
        if self._hyper.clip:
            factor = (self._hyper.clip / (self._norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            gradients.multiply(training, factor.float())

    def _next_actions(self) -> tuple[bool, bool]:
        """Returns two flags that all ranks agree on: True to stop, and True to save."""
        if len(self._agreed) <= (LAG if self.training.world.size > 1 or self.training.device.type == "cuda" else 0):
            return False, False
        stop, save = self._agreed.popleft().tolist()
        return stop > 0, save > 0

    def _begin_interval(self) -> None:
        self._losses.clear()
        self._since, self._idle_s = time.perf_counter(), 0.0

    def _report(self) -> None:
        """Logs the steps since the last line."""
        import torch

        training, steps = self.training, len(self._losses)
        losses = torch.stack(self._losses).tolist()  # waits for the device
        now = time.perf_counter()
        seconds = max(1e-9, now - self._since - self._idle_s) / steps
        self._check()
        flops = training.flops_per_step()
        per_device = flops / seconds / training.world.size if flops else None
        norm = float(self._norm) if self._norm is not None else math.nan
        line: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "samples": self._position(self.step),
            "loss": sum(losses) / steps,
            "lr": max((float(group["lr"]) for group, _ in self._lr), default=None),
            "grad_norm": norm if math.isfinite(norm) else None,
            "step_ms": seconds * 1e3,
            "samples_per_second": training.samples_per_step / seconds,
            "tokens_per_second": training.tokens_per_step / seconds if training.tokens_per_step else None,
            "tflops_per_device": per_device / 1e12 if per_device else None,
            "mfu": per_device / self._peak_flops if per_device and self._peak_flops else None,
            "memory_mib": self._memory_mib() if self._memory_mib else None,
            "seconds": now - self._begun,
            "seconds_left": (self.until - self.step) * seconds,
        }
        if self.saver is not None and not self.saver.busy:
            self._log_saved(self.saver.wait())
        self._steady.append(line["step_ms"])
        self._log(line)
        self._begin_interval()

    def _check(self) -> None:
        """Raises if losses are not finite, or if gradients are not, which the loss may not show yet although the
        weights are affected.
        """
        import torch

        losses = torch.stack(self._losses).tolist() if self._losses else []
        for number, loss in enumerate(losses, self.step - len(losses) + 1):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss of step {number} is {loss}")
        # A scaled loss overflows now and then, and such steps are skipped.
        if self._norm is not None and not self.training.precision.scaled and not math.isfinite(float(self._norm)):
            raise self._diverged(f"the gradients of step {self.step} are not finite")

    def _diverged(self, reason: str) -> Diverged:
        if self.saver is not None:
            self._log_saved(self.saver.wait())
        last_saved = (
            f"the checkpoint of step {self._kept_step} was saved before"
            if self._kept_step
            else "nothing was saved before"
        )
        return Diverged(f"{reason}: {last_saved}; a lower --lr or a longer warmup may help")

    def _evaluate(self) -> None:
        """Logs the mean loss of held-out samples, without dropout: every token has the same weight."""
        training, begin = self.training, time.perf_counter()
        self._check()
        held = self.samples.num_evaluation
        steps = min(self.plan.eval_steps, max(1, held // training.samples_per_step))
        loss = self._held_out_loss(steps)
        if not math.isfinite(loss):
            raise self._diverged(f"the held-out loss of step {self.step} is {loss}")
        self._log({"kind": "evaluation", "step": self.step, "loss": loss, "steps": steps})
        self._idle_s += time.perf_counter() - begin

    def _held_out_loss(self, steps: int) -> float:
        import torch

        training = self.training
        total = torch.zeros((), device=training.device, dtype=torch.float64)
        weights = torch.zeros_like(total)
        training.model.eval()
        with torch.no_grad():
            for step in range(steps):
                share = training.share(self.samples.evaluation, step * training.samples_per_step)
                weight = gradients.labels(training, self.samples, share)
                total += weight * gradients.passes(training, self.samples, share)
                weights += weight
        training.model.train()
        return float(total / weights)

    def _state(self) -> State:
        return State(self.training, self._from_weights)

    def _save(self) -> None:
        """Starts to save a checkpoint of this step."""
        if self.saver is None or self._saved_step == self.step:
            return
        begin = time.perf_counter()
        self._check()
        position = self._position(self.step)
        facts = {**self._facts, "samples": position, **self.training.precision.facts}
        self._log_saved(self.saver.save(self._state(), self.step, facts))
        self._saved_step, self._saved_at = self.step, time.monotonic()
        self._idle_s += time.perf_counter() - begin

    def _log_saved(self, saved: Saved | None) -> None:
        if saved is not None:
            if not saved.failure:
                self._kept_step = saved.step
            self._log(
                {
                    "kind": "checkpoint",
                    "step": saved.step,
                    "seconds": saved.seconds,
                    "stalled": saved.stalled,
                    "failure": saved.failure,
                }
            )

    def _end(self, stopped: bool) -> LoopResult:
        failure, stopped = "", stopped and self.step < self.until
        if self.saver is not None:
            self._save()
            last_save = self.saver.wait()
            self._log_saved(last_save)
            failure = last_save.failure if last_save is not None else ""
        self._log({"kind": "end", "step": self.step, "stopped": stopped, "failure": failure})
        training, flops = self.training, self.training.flops_per_step()
        # The first interval includes warm-up and compilation.
        step_ms = median(self._steady[1:] or self._steady) if self._steady else None
        return LoopResult(
            step=self.step,
            stopped=stopped,
            failure=failure,
            step_ms=step_ms,
            samples_per_step=training.samples_per_step,
            tokens_per_step=training.tokens_per_step,
            tflops_per_device=flops / step_ms * 1e3 / 1e12 / training.world.size if flops and step_ms else None,
            peak_memory_mib=self._memory_mib() if self._memory_mib else None,
        )

    def _position(self, step: int) -> int:
        return self.position + (step - self._first) * self.training.samples_per_step
