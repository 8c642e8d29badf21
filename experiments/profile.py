"""Where a step's time goes: every operation's time under jax.profiler against its roofline bound.

python -m experiments.profile workload.batch_size=8 workload.prompt_len=128
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import ProfileConfig


def main(config: ProfileConfig) -> None:
    from dataclasses import asdict

    from experiments.launch.model import open_llm
    from moejax.bench.profile.capture import name_compiled_programs
    from moejax.bench.profile.run import run_profile
    from moejax.results.result import print_metrics_line

    out = output_dir()
    name_compiled_programs()  # before anything is compiled
    result = run_profile(
        open_llm(config),
        config.workload,
        config.profile,
        config.tracker,
        out,
        config=asdict(config),
        name=config.model.name,
        hardware_kind=config.hardware.kind,
    )
    print_metrics_line(result, out)


if __name__ == "__main__":
    run_experiment(main, "profile")
