"""As much of SLURM as submitit asks for, on one machine: `python fake_slurm.py sbatch|srun|sacct|scancel …`.

`install` puts commands of these names into a folder for the PATH. A job's tasks run as processes of this
machine with the variables that srun sets; the jobs of an array run one after another.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel")


def install(folder: Path) -> None:
    folder.mkdir()
    for name in COMMANDS:
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        command.chmod(0o755)


def sbatch(script: str) -> None:
    """Submits: the jobs run on in a process of their own. FAKE_SLURM_JOB is the job's number."""
    job = os.environ["FAKE_SLURM_JOB"]
    subprocess.Popen(
        [sys.executable, __file__, "run", script, job],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"Submitted batch job {job}")


def run(script: str, job: str) -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", Path(script).read_text(), re.MULTILINE))
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    array = re.match(r"'?0-(\d+)", options.get("array", ""))
    for index in range(int(array[1]) + 1 if array else 1):
        env = {
            **os.environ,
            "SLURM_JOB_ID": str(int(job) + index),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS": str(nodes * tasks),
            "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", "1"),
        }
        if array:
            env |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(index)}
        subprocess.run(["bash", script], env=env, check=False)


def srun(*argv: str) -> None:
    start = next(i for i, word in enumerate(argv) if "python" in Path(word).name)
    options = {argv[i]: argv[i + 1] for i in range(start - 1)}
    nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS"])
    running = []
    for task in range(tasks):
        env = {
            **os.environ,
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % (tasks // nodes)),
            "SLURM_NODEID": str(task // (tasks // nodes)),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_NODES": str(nodes),
        }
        with (
            open(_path(options["--output"], task), "w") as out,
            open(_path(options["--error"], task), "w") as err,
        ):
            running.append(subprocess.Popen(argv[start:], env=env, stdout=out, stderr=err))
    sys.exit(max(process.wait() for process in running))


def _path(pattern: str, task: int) -> str:
    for mark, value in (
        ("%A", os.environ.get("SLURM_ARRAY_JOB_ID", "")),
        ("%a", os.environ.get("SLURM_ARRAY_TASK_ID", "")),
        ("%j", os.environ["SLURM_JOB_ID"]),
        ("%t", str(task)),
    ):
        pattern = pattern.replace(mark, value)
    return pattern


def sacct(*_: str) -> None:
    print("JobID|State|NodeList")


def scancel(*_: str) -> None:
    pass


if __name__ == "__main__":
    {"sbatch": sbatch, "run": run, "srun": srun, "sacct": sacct, "scancel": scancel}[sys.argv[1]](
        *sys.argv[2:]
    )
