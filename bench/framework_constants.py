"""What the estimator's constants are where another framework than redline trains, for tables of such runs."""

from collections.abc import Mapping

from redline.estimator import Constants

# Fitted to runs of theirs, which leaves less to doubt.
_FITTED = Constants(
    compute_std=0.07, launch_std=0.12, link_std=0.15, stall_std=0.25, time_noise=0.07, network_noise=0.14
)
CONSTANTS: Mapping[str, Constants] = {
    "megatron": _FITTED.replace(
        launch_us=30.0,
        # The vocabulary-parallel loss is a chain of plain operators in fp32.
        loss_traffic=2.0,
        overlap=0.1,
        sharded_overlap=0.1,
        straggler_ms=10.0,
    ),
    "nanotron": _FITTED.replace(
        slack=0.12,
        slack_lasting=0.1,
        loss_factor=2.5,
        workspace_mib=350.0,
        launch_us=32.0,
        overlap=0.35,
        # Its ZeRO 1 scatters gradients after the backward.
        sharded_overlap=0.05,
        straggler_ms=22.0,
        ring_step_with_pipeline_us=260.0,
        stall_ms=265.0,
        stall_nodes=34.0,
        stalls_without_zero=True,
        stall_least=0.02,
        stall_fatal=0.3,
        retry_factor=3.0,
    ),
}
"""By the framework that trained."""
