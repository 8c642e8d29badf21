"""Lists the goals of all presets, each with its verdict on the newest run. It writes nothing.

python -m experiments.goals [FOLDER...]     # folders with runs in them; none: outputs and multirun
"""

from experiments.launch.app import run_experiment
from experiments.launch.schema import GoalsConfig


def main(config: GoalsConfig) -> None:
    from collections import Counter

    from experiments.launch.validate import preset_goals
    from moejax.core.files import dump_json
    from moejax.report.goals import goals_table, newest_goals
    from moejax.report.tables import stderr_console

    rows = newest_goals(preset_goals(), config.runs)
    stderr_console().print(goals_table(rows, "goals and their newest verdicts"))
    counts = Counter(row["verdict"].replace(" ", "_") for row in rows)
    print(dump_json({"experiment": "goals", **counts}))


if __name__ == "__main__":
    run_experiment(main, "goals", positional="runs")
