"""The handful of numbers that no datasheet states: efficiencies, overheads, and how uncertain all this is.

They were fitted to measured runs (docs/estimator.md says which, and what runs left out say of them).
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Named constants of the memory and time model."""

    # Memory.
    context_mib: float = 1200.0
    """CUDA context, libraries' workspaces, NCCL's buffers: what the allocator does not know of, MiB a
    device."""
    workspace_mib: float = 300.0
    """Of it, what the allocator does know of and a measured peak contains, MiB."""
    compiled_mib: float = 0.0
    """What a compiled model takes beyond its tensors: code, guards, the compiler's own data, MiB."""
    loss_factor: float = 1.0
    """Copies of the logits that the framework makes, against those of the facts."""
    slack: float = 0.04
    """What the allocator reserves beyond live tensors by fragmentation, as a share of what comes and goes."""
    slack_lasting: float = 0.0
    """The same as a share of what stays, and of what is made once a step for the update."""

    # Compute.
    matmul_efficiency: float = 1.0
    """Of what products reach by `estimator/kernels.py`."""
    limited_rate: float | None = None
    """Share of that rate that its power leaves a device that does nothing but products; None: what `estimator/kernels.py` says
    of the device. See `estimator.time.clocks`."""
    eight_bit_efficiency: float = 0.92
    """Share of what the rates of 8 and 4 bits promise that products of them reach, against those of 16."""
    half_rows: float = 20.0
    """On a CPU: rows (tokens) at which a product has half of the efficiency of an endless one."""
    half_width: float = 16.0
    """The same of its inner and outer dimensions, which tensor parallelism makes thin."""
    tile_rows: float = 128.0
    """Rows of a tile of grouped products, to a multiple of which the rows of each expert are filled up."""
    expert_spread: float = 0.25
    """By how much the rows of an expert depart from their mean, as a share of that: a standard deviation over experts."""
    attention_efficiency: float | None = None
    """Of the peak rate that fused attention reaches; None: what `estimator/kernels.py` says."""
    eager_attention_efficiency: float = 0.45
    """Of the peak rate that the batched products of eager attention reach."""
    bandwidth_efficiency: float = 0.60
    """Of the memory bandwidth that memory-bound kernels reach."""
    launch_us: float = 9.0
    """The host's time to launch a kernel from eager PyTorch, us."""
    host_update_gb_per_s: float = 20.0
    """Rate at which the host updates states that are offloaded to it, 1e9 bytes read and written a second:
    what a socket of a few memory channels reaches, shared by a node's devices."""
    loss_traffic: float = 1.0
    """The loss's memory traffic, against that of the facts."""
    step_ms: float = 1.0
    """What an optimizer step takes beyond all else: loop, logging, clipping, ms."""

    # Links.
    link_efficiency: float = 0.8
    """Of a link's bandwidth that large collectives reach."""
    network_efficiency: float = 0.9
    """The same between nodes."""
    collective_us: float = 50.0
    """Fixed cost of one collective: launch and synchronisation of the ranks, us."""
    switch_us: float = 0.0
    """What a collective waits besides where ranks share cores, until the others have had their turn, us."""
    overlap: float = 0.5
    """Share of the last backward behind which gradients are reduced."""
    sharded_overlap: float = 0.5
    """The same where they are scattered to shards: ZeRO 1 and beyond."""
    overlap_tensor: float = 0.6
    """Share of tensor parallelism's collectives behind products, where they are overlapped at all."""
    max_overlap: float = 0.8
    """Share of a transfer that can hide at all."""
    sharded_max_overlap: float = 0.55
    """The same of weights and gradients that travel block by block (ZeRO 2 and 3): they take units and bandwidth from products
    beside them."""
    network_rails: float = 8.0
    """Members of a ring in one node whose network shares it can use together."""
    straggler_ms: float = 5.0
    """What waiting for the slowest rank adds to a step each time the nodes double, ms."""
    scale_loss: float = 0.01
    """Share of its bandwidth that a collective between nodes loses each time the nodes double."""

    # Pipelines across nodes, where a framework makes them slower than the wires are.
    hop_ms: float = 0.02
    """Cost of handing a micro-batch to the next stage beyond its bytes, ms."""
    ring_step_with_pipeline_us: float = 0.0
    """The host's extra time to start a collective of tensor parallelism while stages talk across nodes, us a
    rank."""
    stall_ms: float = 0.0
    """Cost of a hop between stages when the network stalls, ms: see `stall_nodes`."""
    stall_least: float = 0.0
    """Chance of a stall between any two nodes."""
    stalls_without_zero: bool = False
    """Whether pipelines also stall where ZeRO 0 replicas reduce gradients meanwhile."""
    stall_rings: float = 12.0
    """Replicas times nodes at which half of those runs stall."""
    stall_nodes: float = 36.0
    """Nodes at which half of the runs with a pipeline stall."""
    stall_fatal: float = 0.0
    """Chance that a run that stalls leaves no measurement: it hangs, or outlives its deadline."""

    # A full device.
    retry_factor: float = 1.5
    """By what the step is longer where the allocator must free and ask again, which stops the device."""

    # Uncertainty before any measurement, as standard deviations of natural logarithms.
    compute_std: float = 0.15
    launch_std: float = 0.3
    link_std: float = 0.35
    """Of links within a node."""
    network_std: float = 0.5
    """Of links between nodes."""
    stall_std: float = 0.5
    time_noise: float = 0.12
    """Of a single measured step time about a perfectly calibrated prediction, within a node."""
    network_noise: float = 0.16
    """The same of a run over several nodes."""
    static_std: float = 0.04
    activation_std: float = 0.15
    overhead_std: float = 0.5
    memory_noise: float = 0.11
    """Of a single measured peak about a perfectly calibrated prediction."""

    def replace(self, **changes: Any) -> "Constants":
        """A copy with some changed."""
        return replace(self, **changes)


CPU = Constants(
    # A rank's memory counts from the fork: what is left are pools of threads and of operators.
    context_mib=0.0,
    workspace_mib=45.0,
    compiled_mib=40.0,
    slack=0.0,
    matmul_efficiency=0.95,
    limited_rate=1.0,
    attention_efficiency=0.35,
    # Caches are near, and a launch is a call.
    half_rows=20.0,
    half_width=16.0,
    tile_rows=40.0,
    bandwidth_efficiency=0.2,
    launch_us=20.0,
    # Ranks meet over sockets.
    collective_us=300.0,
    # A time slice of Linux's scheduler: 0.75 ms times 1 + log2(cores), here of two (kernel/sched/fair.c).
    switch_us=1500.0,
    overlap=0.0,
    sharded_overlap=0.0,
    max_overlap=0.0,
    sharded_max_overlap=0.0,
    straggler_ms=0.0,
    retry_factor=1.0,
    # Nobody else need be at rest on the machine.
    compute_std=0.4,
    launch_std=0.5,
    link_std=0.7,
    time_noise=0.35,
    network_noise=0.35,
    static_std=0.1,
    activation_std=0.12,
    overhead_std=0.2,
    memory_noise=0.19,
)
"""Constants of redline's own training on a CPU."""
