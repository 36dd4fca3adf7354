"""The devices of a Ray cluster: their kinds, the hosts of trials on them, and the wait for devices that are taken."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...base.device import Device
from ...base.errors import NoRoom, RunnerError, UsageError
from ...base.option import option
from ...results import Status
from ..trial.job import Job, Outcome
from .ray_host import HostGroup, RayHost, describe

Result = TypeVar("Result")
ACCELERATOR = "accelerator_type:"
"""Prefix of the resource by which Ray's nodes state the kind of their GPUs."""
LITTLE = 0.001
"""Share of that resource that a trial takes on each host: a kind is a property of a node, not an amount."""
DEFAULT_AT_ONCE = 4
"""Trials at once on a cluster that others may use too, unless the request states a number."""
DESCRIBE_S = 60.0
"""Time for a node to describe its devices, s: Ray starts a Python worker there."""
ALL_PLACED_S = 3.0
"""Time after the first trial is placed for further ones, s. Ray places a group in milliseconds if there is room for it."""
FREE_UNUSED_S = 60.0
"""Time for Ray to place a trial although devices are free, s."""
PLACED_AGAIN_S = 30.0
"""Time for nodes to return to a cluster that has become too small for a trial, s."""
STARTS = 3
"""Number of starts of a trial's hosts that are lost before they are ready."""
AGAIN_S = 1.0
"""Interval between attempts to place a host, s."""
SAID_S = 5.0
"""Time until the user is told what a trial waits for, s."""
ANSWER_S = 15.0
"""Time for the hosts of a trial to answer, s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """Devices of one kind in a cluster."""

    device: Device
    """A host's devices; the number is that of the largest host."""
    total: int
    """Number of devices on all live nodes."""
    accelerator: str | None
    """Ray's name of the kind of GPU; None for CPUs, and for GPUs whose kind Ray does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySetup:
    """The trials to place."""

    devices: int
    """Devices of a trial."""
    cuda: bool
    """True if these are GPUs."""
    accelerator: str | None
    """Kind of the GPUs; None for any."""
    concurrency: int | None
    """Trials at once; None for a few on GPUs, and one on a CPU."""
    several_hosts: bool
    """True if the devices of a trial may be on several hosts."""
    imports: tuple[str, ...]
    """Modules that host agents import once."""
    patience_s: float | None
    """Longest wait for devices that others use, s; None for no limit."""
    again: bool = False
    """True if trials were placed before: a cluster that has lost nodes since runs fewer at once."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a trial's ranks on hosts."""

    hosts: int
    """Hosts of a trial."""
    per_host: int
    """Ranks, and therefore devices, on each host."""
    bundle: dict[str, float]
    """Resources that Ray reserves on each host."""
    at_once: int
    """Number of trials that fit on the cluster."""


def lay_out(devices: int, cuda: bool, capacities: Sequence[float]) -> Layout | None:
    """Returns the layout of a trial on the fewest hosts, so that ranks that communicate most are on one; None if it
    does not fit.

    On CPUs a trial that needs more cores than the cluster has runs on one host, whose cores its ranks share.

    Args:
        devices: ranks of a trial.
        cuda: whether a rank needs a GPU or a core.
        capacities: GPUs or cores of each host.
    """
    kind = "GPU" if cuda else "CPU"
    for hosts in range(1, devices + 1):
        if devices % hosts:
            continue
        per_host = devices // hosts
        trials_of_hosts = [int(capacity) // per_host for capacity in capacities]
        # A host with room for two shares is not counted twice: layouts with fewer hosts are tried first.
        at_once = sum(trials_of_hosts) if hosts == 1 else sum(trials > 0 for trials in trials_of_hosts) // hosts
        if at_once:
            bundle = {"CPU": 1.0, "GPU": float(per_host)} if cuda else {kind: float(per_host)}
            return Layout(hosts=hosts, per_host=per_host, bundle=bundle, at_once=at_once)
    if cuda or not any(capacities):
        return None
    return Layout(hosts=1, per_host=devices, bundle={"CPU": 1.0}, at_once=1)


def device_kinds(described: dict[str, Device]) -> list[DeviceKind]:
    """Returns the kinds of GPUs of the joined cluster, those with most devices first, or its CPUs if it has none.

    A node of each kind describes its devices, so that this host needs none.

    Args:
        described: devices of nodes that have described them, by the node's id; further ones are added.

    Raises:
        RunnerError: a node cannot describe its devices.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = live_nodes()
    resource = "GPU" if any(node["Resources"].get("GPU") for node in nodes) else "CPU"
    nodes_of: dict[str | None, list[Any]] = {}
    for node in nodes:
        if node["Resources"].get(resource):
            nodes_of.setdefault(_accelerator(node["Resources"]) if resource == "GPU" else None, []).append(node)
    largest = {
        accelerator: max(nodes, key=lambda node: float(node["Resources"][resource]))
        for accelerator, nodes in nodes_of.items()
    }
    task = ray.remote(num_cpus=0)(describe)
    calls = {
        accelerator: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for accelerator, node in largest.items()
        if node["NodeID"] not in described
    }
    kinds = []
    for accelerator, node in largest.items():
        try:
            if accelerator in calls:
                described[node["NodeID"]] = ray.get(calls[accelerator], timeout=DESCRIBE_S)
        except ray.exceptions.RayError as error:
            raise RunnerError(
                f"the node {node['NodeManagerAddress']} of the Ray cluster cannot describe its devices: {_last_line(error)}; "
                "redline and its packages must be installed on all nodes"
            ) from error
        device = described[node["NodeID"]]
        total = int(sum(node["Resources"][resource] for node in nodes_of[accelerator]))
        if resource == "GPU":
            if device.type != "cuda":
                raise RunnerError(
                    f"the node {node['NodeManagerAddress']} has {node['Resources']['GPU']:g} GPUs for Ray, but none for CUDA"
                )
            device = replace(device, count=int(node["Resources"]["GPU"]))
        kinds.append(DeviceKind(device=device, total=total, accelerator=accelerator))
    return sorted(kinds, key=lambda kind: -kind.total)


def choose_kind(kinds: Sequence[DeviceKind], name: str | None) -> DeviceKind:
    """Returns the kind whose name contains `name`, regardless of case; without a name the one with most devices.

    Raises:
        UsageError: no kind or several kinds have that name, or Ray cannot keep trials off devices of other kinds.
        RunnerError: the cluster has no device.
    """
    if not kinds:
        raise RunnerError("no live node of the Ray cluster has a GPU or a CPU")
    named = [kind for kind in kinds if name is None or name.lower() in kind.device.name.lower()]
    exact = [kind for kind in named if name is not None and name.lower() == kind.device.name.lower()]
    if name is not None and len(exact or named) != 1:
        raise UsageError(f"{option('device_kind')} must name one of {kinds_text(kinds)}, but got '{name}'")
    kind = (exact or named)[0]
    if kind.accelerator is None and len(kinds) > 1:
        raise UsageError(
            f"Ray does not know the kind of the {kind.device.name} nodes, so trials cannot be kept off other nodes "
            f"({kinds_text(kinds)}): start these nodes with `--resources '{{\"{ACCELERATOR}NAME\": 1}}'`, or choose others by "
            f"{option('device_kind')}"
        )
    return kind


def kinds_text(kinds: Sequence[DeviceKind]) -> str:
    """Returns the kinds with their numbers of devices, such as `8 x NVIDIA H100 80GB HBM3, 4 x NVIDIA A100-SXM4-40GB`."""
    return ", ".join(f"{kind.total} x {kind.device.name}" for kind in kinds)


def live_nodes() -> list[Any]:
    """Returns the live nodes of the joined cluster, as `ray.nodes` describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _accelerator(resources: Mapping[str, float]) -> str | None:
    return next((name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)), None)


class Cluster:
    """A placement group for each concurrent trial, with a host agent on each of its hosts.

    A trial runs on one host if one has enough devices, otherwise on as few as possible, with the same number of ranks
    on each. Ranks are numbered host by host, so that tensor-parallel ranks are neighbours on a host.

    Args:
        setup: the trials to place.
        started: True if this process started Ray, on this machine.
        say: receives what the first trial waits for.

    Raises:
        UsageError: the cluster has fewer devices than a trial needs.
        NoRoom: others used the devices for longer than `setup.patience_s`.
        RunnerError: Ray places nothing although devices are free.
    """

    def __init__(self, setup: RaySetup, *, started: bool, say: Callable[[str], None]) -> None:
        self._setup, self._started = setup, started
        self._kind = "GPU" if setup.cuda else "CPU"
        self._placement_groups: list[Any] = []
        self._hosts: dict[int, HostGroup] = {}
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lost: dict[int, float] = {}
        """Slots with a lost host that is not placed again, with the time of the loss on the monotonic clock."""
        self.waited_s = 0.0
        """Time that the first trial waited for devices that others use, s."""
        self._free_since: float | None = None
        """Time since which Ray counts enough free devices for a trial that it does not place, on the monotonic clock."""
        try:
            self.layout = self._lay_out()
            self._place(self._count_slots(), say)
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """Trials at once."""
        return len(self._placement_groups)

    @property
    def note(self) -> str:
        """A sentence about the number of trials at once, if a request does not explain it; empty otherwise."""
        asked = self._setup.concurrency
        possible = self.layout.at_once if asked is None else min(asked, self.layout.at_once)
        if self.slots >= possible or not self._setup.cuda:
            return ""
        at_once = (
            f"{self.slots} trial{'s' * (self.slots > 1)} at once of the {possible} that the cluster has devices for"
        )
        return at_once if asked is not None else f"{at_once}; {option('concurrency')} changes that"

    def _capacities(self, resources_of_nodes: Sequence[Mapping[str, float]]) -> list[float]:
        """Devices of the requested kind on each node, of its resources."""
        wanted = self._setup.accelerator
        return [
            float(resources.get(self._kind, 0))
            for resources in resources_of_nodes
            if wanted is None or ACCELERATOR + wanted in resources
        ]

    def _lay_out(self) -> Layout:
        devices = self._setup.devices
        nodes = [node["Resources"] for node in live_nodes()]
        if not nodes:
            raise RunnerError(f"the Ray cluster has no live node; start one, or pass `{option('runner', 'local')}`")
        capacities = self._capacities(nodes)
        shares = " + ".join(f"{capacity:g}" for capacity in capacities) or "0"
        kind = f"{self._setup.accelerator} GPU" if self._setup.accelerator else self._kind
        layout = lay_out(devices, self._setup.cuda, capacities)
        if layout is None:
            raise (RunnerError if self._setup.again else UsageError)(
                f"a trial needs {devices} devices, the same number on each of its hosts, but the live nodes of the Ray "
                f"cluster have {shares} {kind}s; of a cluster that grows on request, start the nodes first"
            )
        if layout.hosts > 1 and not self._setup.several_hosts:
            raise UsageError(
                f"a callable is one process on one host, but no host of the Ray cluster has {devices} "
                f"{kind}s ({shares}); request fewer devices"
            )
        if self._setup.accelerator is not None:
            layout.bundle[ACCELERATOR + self._setup.accelerator] = LITTLE
        return layout

    def _count_slots(self) -> int:
        possible, concurrency = self.layout.at_once, self._setup.concurrency
        if concurrency is None:
            return min(possible, possible if self._started else DEFAULT_AT_ONCE) if self._setup.cuda else 1
        if concurrency > possible and not self._setup.again:
            capacity = sum(self._capacities([node["Resources"] for node in live_nodes()]))
            raise UsageError(
                f"{concurrency} trials at once need {concurrency * self._setup.devices} {self._kind}s, "
                f"but the Ray cluster has {capacity:g}"
            )
        return min(concurrency, possible)

    def _place(self, slots: int, say: Callable[[str], None]) -> None:
        """Places trials: waits for the first one as long as `setup.patience_s`, and leaves out those without room then."""
        from ray.util.placement_group import placement_group

        layout = self.layout
        requested = [
            placement_group(
                [dict(layout.bundle) for _ in range(layout.hosts)],
                strategy="STRICT_PACK" if layout.hosts == 1 else "STRICT_SPREAD",
            )
            for _ in range(slots)
        ]
        self._placement_groups = list(requested)  # `close` removes them if the wait ends with an error
        begin, placed = time.monotonic(), list[Any]()
        first_placed = said = begin
        while len(placed) < slots:
            placed = [group for group in requested if group.wait(timeout_seconds=0)]
            now = time.monotonic()
            if not placed:
                first_placed = now
                if now - said > SAID_S or (said == begin and now - begin > AGAIN_S):
                    say(self._waits_for(now - begin))
                    said, self.waited_s = now, now - begin
            elif now - first_placed > ALL_PLACED_S:
                break
            time.sleep(0.02 if now - begin < AGAIN_S else AGAIN_S / 4)
        for group in set(requested).difference(placed):
            self._remove(group)
        self._placement_groups = placed
        for slot in range(self.slots):
            self._hosts[slot] = self._host_group(slot)
            self._free.put(slot)

    def _waits_for(self, waited_s: float) -> str:
        """Returns what a trial waits for.

        Raises:
            NoRoom: it has waited for long enough.
            RunnerError: Ray does not place it although devices are free, or the nodes left are too small for it.
        """
        from ray._private import state

        devices = self._setup.devices
        kind = f"{self._setup.accelerator or ''} {self._kind}".strip() + "s" * (devices > 1)
        nodes = [node["Resources"] for node in live_nodes()]
        total = sum(self._capacities(nodes))
        if lay_out(devices, self._setup.cuda, self._capacities(nodes)) is None:
            if waited_s > PLACED_AGAIN_S:
                raise RunnerError(
                    f"a trial needs {devices} {kind}, and the live nodes of the Ray cluster have had only {total:g} for "
                    f"{waited_s:.0f} s"
                )
            return f"waiting for nodes: a trial needs {devices} {kind}, the live nodes have {total:g}"
        # A node whose devices are all in use has none of that resource left, rather than 0 of it.
        capacities = self._capacities(list(state.available_resources_per_node().values()))
        if lay_out(devices, True, capacities) is not None:
            now = time.monotonic()
            # Not from an earlier wait, which ended.
            self._free_since = max(self._free_since or now, now - waited_s)
            if now - self._free_since > FREE_UNUSED_S:
                raise RunnerError(
                    f"Ray placed no trial within {FREE_UNUSED_S:g} s, although {sum(capacities):g} {kind} are free"
                )
        else:
            self._free_since = None
        waiting = f"waiting for {devices} {kind}: {sum(capacities):g} of {total:g} are free"
        patience_s = self._setup.patience_s
        if patience_s is not None and waited_s > patience_s:
            raise NoRoom(
                f"no room on the Ray cluster within {patience_s:g} s: {waiting}. A longer {option('time')} waits longer"
            )
        return waiting

    def _host_group(self, slot: int) -> HostGroup:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        layout = self.layout
        actors = [
            ray.remote(RayHost)
            .options(
                num_cpus=layout.bundle["CPU"],
                num_gpus=layout.bundle.get("GPU", 0),
                # Stops, health checks and output must be answered while a trial runs.
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement_groups[slot], placement_group_bundle_index=host
                ),
            )
            .remote(self._setup.imports)
            for host in range(layout.hosts)
        ]
        return HostGroup(actors, layout.per_host)

    def wait_ready(self, say: Callable[[str], None], imports: tuple[str, ...]) -> None:
        """Waits until trials can start at once.

        Args:
            say: receives what it waits for.
            imports: modules that the host agents import in addition to those of the setup.

        Raises:
            NoRoom, RunnerError: as `dispatch`.
        """
        self._setup = replace(self._setup, imports=(*self._setup.imports, *imports))  # for hosts that are placed again
        for hosts in self._hosts.values():
            hosts.imports = imports
        for attempt in range(1, STARTS + 1):
            slot = self._take_slot(say)
            try:
                return self._call(slot, HostGroup.wait_ready)
            except RunnerError:
                # An agent that does not start here does not start on another host either.
                if slot not in self._lost or attempt == STARTS:
                    raise
            finally:
                self._free.put(slot)

    def dispatch(self, job: Job, say: Callable[[str], None]) -> Outcome:
        """Runs a job on free devices and returns its outcome. `say` receives what it waits for.

        Raises:
            NoRoom: all hosts were lost, and others used the devices for longer than the patience.
            RunnerError: a host of it was lost.
        """
        import ray

        slot = self._take_slot(say)
        try:
            return self._call(slot, lambda hosts: hosts.run(job))
        except RunnerError as error:
            lost = error.__cause__
            if isinstance(lost, ray.exceptions.OutOfMemoryError):
                return Outcome(
                    status=Status.OOM, reason=f"Ray killed it on a host that is short of memory: {_first_line(lost)}"
                )
            raise
        finally:
            self._free.put(slot)

    def _take_slot(self, say: Callable[[str], None]) -> int:
        """Waits for a slot without a lost host."""
        said = time.monotonic()
        slot = self._free.get()
        while slot in self._lost:
            self._free.put(slot)
            time.sleep(0.05)
            lost = list(self._lost.values())
            if time.monotonic() - said > SAID_S and len(lost) == self.slots:
                said = time.monotonic()
                say(self._waits_for(said - max(lost)))
            slot = self._free.get()
        return slot

    def _call(self, slot: int, call: Callable[[HostGroup], Result]) -> Result:
        from ray import exceptions

        try:
            return call(self._hosts[slot])
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except (exceptions.RayError, TimeoutError) as error:
            self._lost[slot] = time.monotonic()
            threading.Thread(target=self._place_again, args=(slot,), daemon=True, name="placing").start()
            raise RunnerError(f"Ray lost the host of a trial: {_first_line(error)}") from error

    def _place_again(self, slot: int) -> None:
        """Places a slot's hosts again, until Ray does not lose them meanwhile."""
        from ray import exceptions

        while slot in self._lost:
            self._hosts[slot].kill()
            hosts = self._hosts[slot] = self._host_group(slot)
            try:
                hosts.wait_placed()
                del self._lost[slot]
            except exceptions.RayError:
                time.sleep(AGAIN_S)

    def check_hosts(self, beat: Callable[[], None]) -> None:
        """Kills ready hosts that do not answer, so that they are placed again. Calls `beat` after each trial's hosts.

        Raises:
            RunnerError: the only node is gone.
        """
        from ray import exceptions

        if self._started and not live_nodes():
            raise RunnerError("Ray's node on this machine is gone")  # another Ray is started
        for hosts in list(self._hosts.values()):
            with contextlib.suppress(exceptions.RayError):  # the caller that waits for its trial gets it too
                try:
                    hosts.answer(ANSWER_S)
                except TimeoutError:
                    hosts.kill()  # which ends that call, so that the caller places it again
            beat()

    def _remove(self, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)

    def close(self) -> None:
        """Ends all trials and gives their devices back."""
        for hosts in self._hosts.values():
            hosts.close()
        for group in self._placement_groups:
            self._remove(group)


def _first_line(error: BaseException) -> str:
    """Returns the first line of a Ray error, which can be very long."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _last_line(error: BaseException) -> str:
    """Returns the last line of a Ray error: the exception of the traceback of a task."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
