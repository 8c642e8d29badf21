"""An experiment run by several processes: all compute, process 0 alone writes, tracks and prints.

The others run the same code on the same configuration, but with no tracker, into a folder that is thrown
away, and with their output shut; their log lines and errors are shown with the process's number in front.
"""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write

from experiments.launch.command_line import has_section
from moejax.core.errors import ConfigError
from moejax.core.files import dump_json
from moejax.core.parallel import ParallelConfig
from moejax.results.sweep import changed_keys
from moejax.sharding.distributed import (
    LaunchEnvironment,
    broadcast,
    initialize_from_environment,
    read_environment,
    reserve_cpu_threads,
)


def prefix() -> str:
    """Returns the mark of this process's lines: `[1] `, and nothing for process 0."""
    try:
        index = read_environment().index
    except ConfigError:
        return ""
    return f"[{index}] " if index else ""


def runs_here(place: LaunchEnvironment, schema: type) -> bool:
    """Whether this process has a part in the experiment: without a mesh, process 0 runs it alone."""
    return place.index == 0 or has_section(schema, "parallel")


@contextlib.contextmanager
def own_folder(place: LaunchEnvironment) -> Iterator[list[str]]:
    """Hydra's overrides for this process.

    Process 0 has none: it makes the run's folder, named after the time. Another process's is temporary.
    """
    if place.index == 0:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix=f"moejax-process-{place.index}-") as folder:
        yield [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", "hydra.output_subdir=null"]


@contextlib.contextmanager
def taking_part(config: Any) -> Iterator[Any]:
    """Joins the other processes, and yields the configuration that this one is to run.

    Raises:
        ConfigError: this process's configuration is not process 0's, or a process has no device in the mesh.
        ConfigError, DeviceError: as `initialize_from_environment`.
    """
    if not has_section(type(config), "parallel"):
        yield config
        return
    if config.parallel.num_devices > 1:
        reserve_cpu_threads()
    info = initialize_from_environment()
    if info.count == 1:
        yield config
        return
    _check_same(config, info.index)
    _check_all_needed(config.parallel, info)
    if info.index == 0:
        with _stdout_for_results():
            yield config
        return
    if has_section(type(config), "tracker"):
        config = dataclasses.replace(config, tracker=dataclasses.replace(config.tracker, kind="none"))
    with tempfile.TemporaryDirectory(prefix=f"moejax-process-{info.index}-") as folder:
        # Under submitit all processes share the output folder that Hydra made.
        job: Any = HydraConfig.get()
        with read_write(job), open_dict(job):
            job.runtime.output_dir = folder
        _mark_log(f"[{info.index}] ")
        with (
            open(os.devnull, "w") as nowhere,
            _stdout_for_results(),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield config


@contextlib.contextmanager
def _stdout_for_results() -> Iterator[None]:
    """Gloo tells C's stdout of each connection. Those lines go to stderr, Python's to stdout as before."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", closefd=False) as stdout, contextlib.redirect_stdout(stdout):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _check_same(config: Any, index: int) -> None:
    """Refuses a configuration that is not process 0's, but for where it runs and is tracked."""
    computed = {
        key: value
        for key, value in dataclasses.asdict(config).items()
        if key not in ("tracker", "verbose", "host")
    }
    ours = json.loads(dump_json(computed))
    theirs = json.loads(broadcast(dump_json(ours)))
    keys = sorted({change.partition(" ")[0] for change in changed_keys(ours, theirs)})
    if keys:
        raise ConfigError(
            f"process {index} was started with another configuration than process 0: {', '.join(keys)}; "
            "start all processes with the same command line"
        )


def _check_all_needed(parallel: ParallelConfig, info: LaunchEnvironment) -> None:
    """Devices are numbered process by process, and the mesh takes the first: one without any would hang."""
    local, needed = info.local_devices, parallel.num_devices
    if needed <= (info.count - 1) * local:
        raise ConfigError(
            f"parallel: {needed} devices do not reach over {info.count} processes of {local} devices each: "
            f"start {-(-needed // local)}, or choose a larger layout"
        )


def _mark_log(mark: str) -> None:
    """Log lines go to stderr only, marked; warnings too."""
    logging.captureWarnings(True)
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
            handler.close()
        elif isinstance(handler, logging.StreamHandler):
            # Not sys.stderr by name: that is about to lead nowhere.
            handler.setStream(sys.__stderr__ or sys.stderr)
            form = handler.formatter._fmt if handler.formatter and handler.formatter._fmt else "%(message)s"
            if not form.startswith(mark):
                handler.setFormatter(logging.Formatter(mark + form))
