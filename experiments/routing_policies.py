"""Policies of choosing experts beside the model's own: predictions, experts visited, decode time.

python -m experiments.routing_policies 'routing_policies.policies=[top_p_60,batch_2]'
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import RoutingPoliciesConfig


def main(config: RoutingPoliciesConfig) -> None:
    from functools import partial

    from experiments.launch.model import open_with_policy
    from moejax.bench.experiment_run import ExperimentRun
    from moejax.bench.routing_policies.run import run_policies

    with ExperimentRun.open("routing_policies", config, output_dir()) as run:
        run_policies(partial(open_with_policy, config), config.routing_policies, run, seed=config.seed)


if __name__ == "__main__":
    run_experiment(main, "routing_policies", ahead=True)
