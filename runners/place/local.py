"""Trials on this machine without Ray."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from ...base.device import visible_gpus
from ...base.errors import UsageError
from ...models import Workload
from ..dispatch import DryRunner
from ..host.client import HostAgent
from ..runner import TrialTerms, Work
from ..trial.job import Job, Outcome


class FreeDevices:
    """Devices that concurrent trials take and give back. One trial at a time uses a device.

    Args:
        ids: of the devices, as in `CUDA_VISIBLE_DEVICES`.
        count: number of devices without ids, as on a CPU.
    """

    def __init__(self, ids: Sequence[str] = (), *, count: int = 0) -> None:
        self._named = bool(ids)
        self._order = {device_id: position for position, device_id in enumerate(ids)}
        self._free = list(ids) if ids else [""] * count
        self._changed = threading.Condition()

    def take(self, count: int) -> tuple[str, ...]:
        """Waits for `count` free devices, takes the first ones and returns their ids; empty for devices without ids."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        return tuple(taken) if self._named else ()

    def give_back(self, ids: Sequence[str], count: int) -> None:
        """Returns devices that `take` gave, with the same count."""
        with self._changed:
            self._free += ids if self._named else [""] * count
            self._free.sort(key=lambda device_id: self._order.get(device_id, 0))  # neighbours have the fastest links
            self._changed.notify_all()


class LocalRunner(DryRunner):
    """Runs trials through one host agent on this machine, as many at once as devices allow.

    Args:
        work: the work of the trials; a workload for its dry runs.
        terms: devices, limits and deadlines of every trial.
        concurrency: trials at once; by default the number of devices over the devices of a trial, and one on a CPU.
        agent: an agent that was started beforehand, which this runner closes; by default one is started.

    Raises:
        UsageError: a trial needs more devices than there are.
    """

    name = "local"

    def __init__(
        self,
        work: Workload | Work,
        terms: TrialTerms,
        *,
        concurrency: int | None = None,
        agent: HostAgent | None = None,
    ) -> None:
        super().__init__(work, terms)
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
        ids = visible_gpus(terms.device.count) if cuda else []
        self._devices = FreeDevices(ids[: at_once * terms.devices], count=at_once * terms.devices)
        if agent is None:
            agent = HostAgent(self.work.imports)
        else:
            agent.also_import(self.work.imports)
        self._agent = agent

    def dispatch(self, job: Job) -> Outcome:
        ids = self._devices.take(self.terms.devices)
        try:
            return self._agent.run(replace(job, device_ids=ids), key=job.log or "")
        finally:
            self._devices.give_back(ids, self.terms.devices)

    def stop(self, log: str) -> None:
        """Stops the trial that writes this log."""
        self._agent.stop(log)

    def wait_ready(self) -> None:
        """Waits until trials can start at once."""
        self._agent.wait_ready()

    def close(self) -> None:
        self.closed = True
        self._agent.close()
