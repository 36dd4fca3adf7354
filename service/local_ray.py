"""The process of this machine's own Ray: `python -m redline.service.local_ray FILE DEVICES`.

Ray's head and node end with the process that started them, so that this one, which does nothing else, keeps them while the
server is started again.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ..base.device import detect
from ..base.errors import RunnerError
from ..runners.host.process import adopt_orphans, kill_descendants
from ..runners.place.ray_driver import check_listens
from .cluster import ALONE_S, write_record

LOOK_S = 1.0  # s between looks for a server that uses it


def main() -> None:
    """Runs Ray until it is terminated, Ray is lost, or no server has used it for `ALONE_S`."""
    file, devices = Path(sys.argv[1]), int(sys.argv[2])
    adopt_orphans()  # workers of Ray that were left behind are killed below
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's monitor would kill the host agent, of which only the trial's ranks should be.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    import ray

    resources: dict[str, Any] = {}
    if devices:
        resources = {"num_gpus" if detect().type == "cuda" else "num_cpus": devices}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False, **resources)
        address: str = ray.get_runtime_context().gcs_address
        write_record(file, address)
        while file.exists() and time.time() - file.stat().st_mtime < ALONE_S:
            time.sleep(LOOK_S)
            check_listens(address)  # without a head `ray.nodes` does not return
            if not any(node["Alive"] for node in ray.nodes()):
                sys.exit("Ray's node on this machine is gone")
    except RunnerError as error:
        sys.exit(str(error))
    finally:
        ray.shutdown()
        kill_descendants()


if __name__ == "__main__":
    main()
