"""Keeps a repository of models: versions with their hashes and provenance, of which one is in production.

python -m experiments.models action=add name=tiny path=CHECKPOINT    # also: list, promote version=2, rollback
"""

from dataclasses import asdict

from experiments.launch.app import run_experiment
from experiments.launch.schema import ModelsConfig


def main(config: ModelsConfig) -> None:
    from moejax.core.files import dump_json
    from moejax.report.tables import Column, column_table, stderr_console
    from moejax.tracking.repository import PRODUCTION, Repository

    repository, project = Repository(config.root), config.wandb_project
    if project is not None:
        from moejax.tracking.base import TrackerConfig
        from moejax.tracking.wandb import publish_model, require_login, set_alias

        # Before anything is changed.
        require_login(TrackerConfig().timeout_s, "or leave out wandb_project")
    # With W&B what is so already is done again, since an earlier call may not have reached it.
    name, again = config.name or "", project is not None
    match config.action:
        case "add":
            found = [repository.add(name, config.path or "", again=again)]
        case "promote":
            found = [repository.promote(name, config.version or 0, again=again)]
        case "rollback":
            found = [repository.rollback(name)]
        case _:
            found = repository.versions(config.name)
    if project is not None:
        (one,) = found
        alias = f"version-{one.version}"  # W&B keeps v1, v2, … for itself
        if config.action == "add":
            publish_model(project, repository.folder(one.name, one.version), one.name, alias)
        else:
            set_alias(project, one.name, alias, PRODUCTION)
    rows = [asdict(version) for version in found]
    for row in rows:
        row |= {"short_hash": row["hash"][:12], "source": row["provenance"]["source"],
                "mb": f"{row['bytes'] / 1e6:,.1f}"}  # fmt: skip
    titles = {"name": "name", "version": "version", "stage": "stage", "MB": "mb", "added": "added",
              "hash": "short_hash", "from": "source"}  # fmt: skip
    columns = [Column(title, key, cell=str, fold=True) for title, key in titles.items()]
    stderr_console().print(column_table(f"models in {config.root}", columns, rows))
    print(dump_json({"experiment": "models", "action": config.action, "models": [asdict(v) for v in found]}))


if __name__ == "__main__":
    run_experiment(main, "models")
