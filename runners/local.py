"""Trials on this machine without Ray, on devices that may be shared with other searches."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from ..base.device import visible_gpus
from ..base.errors import UsageError
from ..models import Workload
from .dispatch import DryRunner
from .host import HostAgent
from .job import Job, Outcome
from .work import TrialTerms, Work


class SharedDevices:
    """Devices that several trials share, of one runner or of many; each device is one trial's at a time.

    Args:
        ids: of the devices, as `CUDA_VISIBLE_DEVICES` names them.
        count: how many there are where they have no ids, as a CPU's.
    """

    def __init__(self, ids: Sequence[str] = (), *, count: int = 0) -> None:
        self._named = bool(ids)
        self._free = list(ids) if ids else [""] * count
        self._changed = threading.Condition()

    def take(self, count: int) -> tuple[str, ...]:
        """So many devices, the first that are free; waits until there are as many. Devices without ids give none."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        return tuple(taken) if self._named else ()

    def give_back(self, ids: Sequence[str], count: int) -> None:
        """Devices that `take` gave, and how many it was asked for."""
        with self._changed:
            self._free = sorted([*self._free, *(ids if self._named else [""] * count)])
            self._changed.notify_all()


class LocalRunner(DryRunner):
    """One host agent here; as many trials at once as devices allow.

    Args:
        what: the workload that is trained, or other work.
        terms: devices, limits and deadlines of every trial.
        concurrency: trials at once; by default devices present over devices a trial, and one on a CPU.
        agent: one that was started beforehand; this runner closes it. By default one is started.
        shared: the devices it shares with other runners; by default those that so many trials at once need are its own.

    Raises:
        UsageError: a trial needs more devices than there are.
    """

    name = "local"

    def __init__(
        self,
        what: Workload | Work,
        terms: TrialTerms,
        *,
        concurrency: int | None = None,
        agent: HostAgent | None = None,
        shared: SharedDevices | None = None,
    ) -> None:
        super().__init__(what, terms)
        cuda = terms.device.type == "cuda"
        if cuda and terms.devices > terms.device.count:
            raise UsageError(
                f"devices must be at most the {terms.device.count} present ({terms.device.name}), "
                f"but got devices={terms.devices}"
            )
        at_once = terms.device.count // terms.devices if cuda else 1
        if concurrency is not None:
            if cuda and concurrency > at_once:
                raise UsageError(
                    f"{concurrency} trials at once need {concurrency * terms.devices} devices, "
                    f"but there are {terms.device.count}"
                )
            at_once = concurrency
        self.slots = at_once
        if shared is None:
            ids = visible_gpus(terms.device.count) if cuda else []
            shared = SharedDevices(ids[: at_once * terms.devices], count=at_once * terms.devices)
        self._shared = shared
        if agent is None:
            agent = HostAgent(self.work.imports)
        else:
            agent.also_import(self.work.imports)
        self._agent = agent

    def dispatch(self, job: Job) -> Outcome:
        ids = self._shared.take(self.terms.devices)
        try:
            return self._agent.run(replace(job, device_ids=ids), key=job.log or "")
        finally:
            self._shared.give_back(ids, self.terms.devices)

    def stop(self, log: str) -> None:
        """Ends the trial that writes this log."""
        self._agent.stop(log)

    def wait_ready(self) -> None:
        """Returns when the first trial would start at once."""
        self._agent.wait_ready()

    def close(self) -> None:
        self.closed = True
        self._agent.close()
