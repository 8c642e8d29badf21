"""A tiny experiment for the tests of sweeps, without JAX; `python -m` runs it.

Each job appends its seed to $RUNS, writes a result and returns -(seed - 3)². Seed 2 waits before it has
written the whole result, for a test to kill it, while $RUNS has no second 2. Seed 13 fails by a user's
mistake while there is no file "mended" in the working directory.
"""

import os
import time
from pathlib import Path

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import LatencyConfig


def main(config: LatencyConfig) -> float:
    from moejax.core.errors import ConfigError
    from moejax.results.result import build_result, write_result

    runs = Path(os.environ["RUNS"])
    with open(runs, "a") as file:
        file.write(f"{config.seed}\n")
    if config.seed == 2 and runs.read_text().split().count("2") == 1:
        (output_dir() / "result.json").write_text('{"schema": 1, "metr')
        time.sleep(120)
    if config.seed == 13 and not Path("mended").exists():
        raise ConfigError("seed 13 brings bad luck")
    value = -float((config.seed - 3) ** 2)
    cases = [{"case": 0, "batch_size": b, "median_ttft_ms": config.seed * b * 1.0} for b in (1, 4)]
    metrics = {"median_ttft_ms": value}
    result = build_result("latency", metrics=metrics, config={}, provenance={}, cases=cases)
    write_result(result, output_dir())
    return value


if __name__ == "__main__":
    run_experiment(main, "latency")
