"""Where a step's time goes: every operation's time under jax.profiler against its roofline bound.

python -m experiments.profile workload.batch_size=8 workload.prompt_len=128
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import ProfileConfig


def main(config: ProfileConfig) -> None:
    from experiments.launch.model import open_llm
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.profile.capture import name_compiled_programs
    from moejax.bench.profile.run import run_profile

    name_compiled_programs()  # before anything is compiled
    with ExperimentRun.open("profile", config, output_dir()) as run, open_llm(config) as llm:
        run_profile(llm, config.workload, config.profile, run)


if __name__ == "__main__":
    run_experiment(main, "profile", ahead=True)
