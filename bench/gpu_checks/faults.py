"""Checks that trials end correctly after every fault and that the device recovers.

Each fault is a program of a trial's rank (`Job.program`), which a real `LocalRunner` runs among real dry runs.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
from redline.base.device import detect
from redline.base.gpus import gpu_use
from redline.models.resolve import workload as preset
from redline.runners.dispatch import DryRuns
from redline.runners.place.local import LocalRunner
from redline.runners.runner import TrialRequest, TrialTerms
from redline.runners.trial.job import Job
from redline.runners.trial.timing import TimingPlan
from redline.space import Config

from . import Row, Setting

LIMIT_MIB = 600.0
"""Memory of a rank on a CPU."""
BACK_S, NEAR_MIB = 30.0, 64.0
"""Seconds in which the memory of the device must be free again, and the tolerance."""

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def trials(setting: Setting) -> Iterator[Row]:
    """ok, then every kind of failure, then ok again, in one runner."""
    device = detect()
    terms = TrialTerms(
        device=device,
        memory_limit_mib=None if setting.cuda else LIMIT_MIB,
        threads=None if setting.cuda else 1,
        plan=TimingPlan(seconds=0.1 if setting.tiny else 1.0),
    )
    small = preset("gpt2-tiny", global_batch=8, seq_len=16 if setting.tiny else 64)
    faults: list[tuple[str, str, Callable[[Any], object] | None]] = [
        ("a dry run", "ok", None),
        ("allocates without end", "oom", _without_end),
        ("takes 95 % of the memory", "ok", _nearly_all),
        ("a device assertion", "crash", _assertion),
        ("kill -9 in a step", "crash", _killed),
        ("a step without end", "timeout", _endless),
        ("a dry run afterwards", "ok", None),
    ]
    runner = LocalRunner(DryRuns(small, compiles=False), terms, agent=setting.agent)
    before = [each.used_mib for each in gpu_use()]
    for number, (what, expected, program) in enumerate(faults):
        if program is None:
            measured = runner.run(TrialRequest(config=Config({"micro_batch": 8}), number=number))
            status, reason = measured.status.value, measured.reason
        else:
            job = Job(
                program=cloudpickle.dumps(program),
                device_type=setting.device,
                threads=1,
                memory_limit_mib=terms.memory_limit_mib,
                timeout_s=1.0 if expected == "timeout" else 60.0,
            )
            outcome = runner.dispatch(job)
            status, reason = outcome.status.value, outcome.reason
        seconds = _until_back(before)
        yield {
            "what": what,
            "status": status,
            "reason": reason[:150],
            "memory_back_s": seconds,
            "holds": status == expected and seconds < BACK_S,
        }


def _until_back(before: list[float]) -> float:
    """Returns the seconds until no GPU uses more memory than before."""
    begin = time.monotonic()
    while any(now.used_mib > then + NEAR_MIB for now, then in zip(gpu_use(), before, strict=True)):
        if time.monotonic() - begin > BACK_S:
            break
        time.sleep(0.02)
    return time.monotonic() - begin


def _fill(context: Any, leave_mib: float, step_mib: int = 64) -> list[torch.Tensor]:
    """Allocates the memory of the rank except for `leave_mib`."""
    device, step = torch.device(context.device_type), step_mib * 2**20
    if device.type == "cuda":
        torch.zeros(1, device=device)
        count = int((torch.cuda.mem_get_info()[0] / 2**20 - leave_mib) // step_mib)
    else:
        count = int((context.memory_limit_mib - leave_mib) // step_mib)
    return [torch.empty(step, dtype=torch.uint8, device=device) for _ in range(count)]


def _without_end(context: Any) -> None:
    held = []
    while True:
        held.append(torch.empty(2**28, dtype=torch.uint8, device=context.device_type))


def _nearly_all(context: Any) -> int:
    whole = torch.cuda.mem_get_info()[0] / 2**20 if context.device_type == "cuda" else context.memory_limit_mib
    return len(_fill(context, 0.05 * whole))


def _assertion(context: Any) -> float:
    at = torch.tensor([9], device=context.device_type)
    return float(torch.zeros(4, device=context.device_type)[at].sum())


def _killed(context: Any) -> None:
    product = torch.ones(256, 256, device=context.device_type)
    (product @ product).sum().item()
    os.kill(os.getpid(), signal.SIGKILL)


def _endless(context: Any) -> None:
    product = torch.ones(1024, 1024, device=context.device_type)
    while True:
        product = (product @ product).clamp(max=1)
        if context.device_type == "cuda":
            torch.cuda.synchronize()


def exhaustion(setting: Setting) -> Iterator[Row]:
    """The first call of a library on a full device ends as `oom`, not as a crash."""
    calls: dict[str, Callable[[Any], object]] = {"a product (cublasCreate)": _product}
    if setting.cuda:
        calls |= {
            "NCCL's initialisation": _collective,
            "a Triton kernel": _compiled,
            "a convolution (cuDNN)": _convolution,
        }
    terms = TrialTerms(device=detect(), memory_limit_mib=None if setting.cuda else LIMIT_MIB, threads=1)
    runner = LocalRunner(
        DryRuns(preset("gpt2-tiny", global_batch=8), compiles=setting.cuda), terms, agent=setting.agent
    )
    for what, call in calls.items():
        for leave in (4,) if setting.tiny else (2, 16, 64):
            job = Job(
                program=cloudpickle.dumps(_on_a_full_device(call, leave)),
                device_type=setting.device,
                threads=1,
                memory_limit_mib=terms.memory_limit_mib,
                timeout_s=30.0,
            )
            outcome = runner.dispatch(job)
            # A call that fits into the rest passes as well.
            holds = outcome.status.value in ("oom", "ok")
            yield {
                "what": f"{what} with {leave} MiB left",
                "status": outcome.status.value,
                "reason": outcome.reason[:200],
                "holds": holds,
            }


def _on_a_full_device(call: Callable[[Any], object], leave_mib: int) -> Callable[[Any], None]:
    def program(context: Any) -> None:
        held = _fill(context, leave_mib + 64, 64)
        held += _fill(context, leave_mib, 1) if context.device_type == "cuda" else []
        call(context)
        assert held

    return program


def _product(context: Any) -> None:
    side = 64 if context.device_type == "cuda" else 8192
    one = torch.ones(side, side, device=context.device_type)
    (one @ one).sum().item()


def _convolution(context: Any) -> None:
    torch.nn.functional.conv2d(
        torch.ones(1, 3, 32, 32, device="cuda"), torch.ones(8, 3, 3, 3, device="cuda")
    ).sum().item()


def _collective(context: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=context.init_method, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def _compiled(context: Any) -> None:
    torch.compile(lambda x: (x * 2 + 1).relu())(torch.ones(4096, device="cuda")).sum().item()
