"""Constants that no datasheet states: efficiencies, overheads, and their uncertainty.

They are fitted to measured runs (docs/estimator.md lists these and the errors on runs that were left out).
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Named constants of the memory and time model."""

    # Memory.
    context_mib: float = 1200.0
    """CUDA context, libraries' workspaces, NCCL's buffers: memory outside the allocator, MiB a device."""
    workspace_mib: float = 300.0
    """The part of `context_mib` that the allocator counts and a measured peak contains, MiB."""
    compiled_mib: float = 0.0
    """Memory of a compiled model beyond its tensors: code, guards, the compiler's own data, MiB."""
    loss_factor: float = 1.0
    """Ratio of the framework's copies of the logits to those of the facts."""
    slack: float = 0.04
    """Memory that the allocator reserves beyond live tensors by fragmentation, as a share of temporary memory."""
    slack_lasting: float = 0.0
    """The same as a share of lasting memory and of the temporaries of the update."""

    # Compute.
    matmul_efficiency: float = 1.0
    """Efficiency of products relative to `estimator/kernels.py`."""
    limited_rate: float | None = None
    """Share of the product rate that a power-limited device sustains when it runs only products; None: the value of
    `estimator/kernels.py` for the device. See `estimator.slot.clocks`."""
    early_kernels: float = 0.77
    """Rate of products on Blackwell of libraries before November 2025 relative to later ones."""
    eight_bit_efficiency: float = 0.92
    """Share of the rate of 8 bits that products with one scale a tensor or row reach."""
    mxfp8_efficiency: float = 0.80
    """The same for 8 bits with a scale for each 32 numbers."""
    nvfp4_efficiency: float = 0.70
    """Share of the rate of 4 bits that products with a scale for each 16 numbers reach."""
    half_rows: float = 20.0
    """On a CPU: rows (tokens) at which a product has half of the efficiency of one with infinitely many."""
    half_width: float = 16.0
    """The same for its inner and outer dimensions, which tensor parallelism divides."""
    tile_rows: float = 128.0
    """Rows of a tile of grouped products; the rows of each expert are padded to a multiple of it."""
    expert_spread: float = 0.25
    """Standard deviation of the rows of an expert over the experts, as a share of their mean."""
    attention_efficiency: float | None = None
    """Share of the peak rate that fused attention reaches; None: the value of `estimator/kernels.py`."""
    eager_attention_efficiency: float = 0.45
    """Share of the peak rate that the batched products of eager attention reach."""
    bandwidth_efficiency: float = 0.60
    """Share of the memory bandwidth that memory-bound kernels reach."""
    launch_us: float = 9.0
    """Host time to launch a kernel from eager PyTorch, us."""
    gather_us: float = 0.0
    """Host time to gather or release the weights of one module at ZeRO 3, us: DeepSpeed's hooks around each module. Full
    fine-tuning of Qwen 1.8B and 7B by micro-batches of 256 tokens takes 2.1 and 4.0 s a step on A100s, of which computing and
    launches are 0.5 and 1.6 s (README of github.com/QwenLM/Qwen)."""
    host_update_gb_per_s: float = 76.0
    """Rate at which the ranks of a node together update offloaded states, 1e9 bytes read and written a second: the 400 ms that
    offloading adds to gpt2-large (bench/results/gpu-h200.md) are 6.2 GB of copies and an update of 21.7 GB."""
    pageable_share: float = 0.45
    """Rate of copies from memory that is not pinned relative to that of pinned memory: 11 for 25 GB/s over PCIe 4, 6 for 12 GB/s
    over PCIe 3 (CUDA samples, bandwidthTest)."""
    deepspeed_update_gb_per_s: float = 14.0
    """The same for DeepSpeed, with the norm and the conversion of the gradients: LLaMA-7B on 8 x A800 takes 20.1 s more with
    ZeRO 2 and 8 micro-batches, 16.8 s with ZeRO 3 and 4 (gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a)."""
    loss_traffic: float = 1.0
    """Ratio of the loss's memory traffic to that of the facts."""
    step_ms: float = 1.0
    """Fixed time of an optimizer step: loop, logging, clipping, ms."""

    # Links.
    link_efficiency: float = 0.8
    """Share of a link's bandwidth that large collectives reach."""
    network_efficiency: float = 0.9
    """The same between nodes."""
    collective_us: float = 50.0
    """Fixed cost of one collective: launch and synchronisation of the ranks, us."""
    switch_us: float = 0.0
    """Extra wait of a collective if ranks share cores, until the others have had their time slice, us."""
    overlap: float = 0.5
    """Share of the last backward that overlaps with the reduction of gradients."""
    sharded_overlap: float = 0.5
    """The same if gradients are scattered to shards: ZeRO 1 and above."""
    overlap_tensor: float = 0.6
    """Share of tensor parallelism's collectives that overlaps with products, if overlap is on."""
    max_overlap: float = 0.8
    """Maximum share of a transfer that can be hidden."""
    sharded_max_overlap: float = 0.55
    """The same for weights and gradients that are sent block by block (ZeRO 2 and 3): they take multiprocessors and bandwidth
    from concurrent products."""
    network_rails: float = 8.0
    """Maximum number of ring members on one node whose network shares add up."""
    straggler_ms: float = 5.0
    """Time that waiting for the slowest rank adds to a step each time the number of nodes doubles, ms."""
    scale_loss: float = 0.01
    """Share of its bandwidth that a collective between nodes loses each time the number of nodes doubles."""

    # Pipelines across nodes, if a framework makes them slower than the links are.
    hop_ms: float = 0.02
    """Time to hand a micro-batch to the next stage beyond its bytes, ms."""
    ring_step_with_pipeline_us: float = 0.0
    """Extra host time to start a collective of tensor parallelism while stages communicate across nodes, us a rank."""
    stall_ms: float = 0.0
    """Time of a hop between stages when the network stalls, ms: see `stall_nodes`."""
    stall_least: float = 0.0
    """Chance of a stall between any two nodes."""
    stalls_without_zero: bool = False
    """True if pipelines also stall while ZeRO 0 replicas reduce gradients."""
    stall_rings: float = 12.0
    """Replicas times nodes at which half of the runs stall."""
    stall_nodes: float = 36.0
    """Nodes at which half of the runs with a pipeline stall."""
    stall_fatal: float = 0.0
    """Chance that a stalled run leaves no measurement: it hangs or exceeds its deadline."""

    # A full device.
    retry_factor: float = 1.5
    """Factor of the step time if the allocator must free and retry, which stops the device."""

    # Uncertainty before any measurement, as standard deviations of natural logarithms.
    compute_std: float = 0.07
    launch_std: float = 0.3
    link_std: float = 0.35
    """For links within a node."""
    network_std: float = 0.5
    """For links between nodes."""
    stall_std: float = 0.5
    time_noise: float = 0.15
    """Noise of a single measured step time about a perfectly calibrated prediction, within a node."""
    network_noise: float = 0.18
    """The same for a run over several nodes."""
    sibling_std: float = 0.08
    """Further uncertainty of a device without measured runs, of a generation that has them. This and the following: standard
    deviations of the biases of devices and trainers that were left out of the fit (docs/estimator.md)."""
    foreign_std: float = 0.20
    """The same for a device of another vendor or generation."""
    early_std: float = 0.12
    """The same for early kernels on Blackwell."""
    software_std: float = 0.0
    """The same for a trainer without measured runs."""
    experts_std: float = 0.12
    """Further noise of the step time of a mixture of experts."""
    scale_std: float = 0.04
    """Further uncertainty of a step time for each doubling of the nodes beyond the most on which trials were measured."""
    static_std: float = 0.04
    activation_std: float = 0.06
    overhead_std: float = 0.5
    memory_noise: float = 0.14
    """Noise of a single measured peak about a perfectly calibrated prediction."""

    def replace(self, **changes: Any) -> "Constants":
        """A copy with some fields changed."""
        return replace(self, **changes)


CPU = Constants(
    # A rank's memory counts from the fork: the remainder is pools of threads and of operators.
    context_mib=0.0,
    workspace_mib=45.0,
    compiled_mib=40.0,
    slack=0.0,
    matmul_efficiency=0.95,
    limited_rate=1.0,
    attention_efficiency=0.35,
    # Caches are close, and a launch is a function call.
    tile_rows=40.0,
    bandwidth_efficiency=0.2,
    launch_us=20.0,
    # Ranks communicate over sockets.
    collective_us=300.0,
    # A time slice of Linux's scheduler: 0.75 ms times 1 + log2(cores), here of two (kernel/sched/fair.c).
    switch_us=1500.0,
    overlap=0.0,
    sharded_overlap=0.0,
    max_overlap=0.0,
    sharded_max_overlap=0.0,
    straggler_ms=0.0,
    retry_factor=1.0,
    # Other processes may load the machine.
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
