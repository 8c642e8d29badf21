"""Stages that build on each other: what each gains over the one before, and all together, in turns.

python -m experiments.ablation 'ablation.stages.full=[quant=none]' 'ablation.stages.int8=[quant=int8]'
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import AblationConfig


def main(config: AblationConfig) -> None:
    from experiments.launch.variants import run_variants

    run_variants(config, output_dir())


if __name__ == "__main__":
    run_experiment(main, "ablation", ahead=True)
