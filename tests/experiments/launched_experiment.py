"""A tiny experiment for the tests of launchers and of several processes; `python -m` runs it.

It adds up one number a device over all devices, writes the sum and prints it. Some seeds fail in the last
process: 13 by a user's mistake, 14 by a defect, 15 by a kill.
"""

import json
import os
import signal

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import LatencyConfig


def main(config: LatencyConfig) -> None:
    import logging
    import sys
    import warnings

    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from moejax.core.errors import ConfigError
    from moejax.core.files import atomic_write_text
    from moejax.sharding.distributed import initialize_from_environment, process_count
    from moejax.tracking.base import RunInfo
    from moejax.tracking.factory import make_tracker

    last = initialize_from_environment().index == process_count() - 1
    if config.seed == 13 and last:
        raise ConfigError("seed 13 brings bad luck")
    if config.seed == 14 and last:
        raise ZeroDivisionError("a defect of seed 14")
    if config.seed == 15 and last:
        os.kill(os.getpid(), signal.SIGKILL)
    logging.getLogger("experiments").info("at work")
    warnings.warn("beware", stacklevel=1)
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    ones = np.ones(len(devices), np.float32)
    x = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, PartitionSpec("x")), lambda index: ones[index]
    )
    total = float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x))
    result = {"sum": total, "seed": config.seed, "processes": process_count(), "tracker": config.tracker.kind}
    with make_tracker(config.tracker, RunInfo("test", "launched", output_dir())) as tracker:
        tracker.summary({"sum": total})
        atomic_write_text(output_dir() / "result.json", json.dumps(result))
    print("a table", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    run_experiment(main, "latency")
