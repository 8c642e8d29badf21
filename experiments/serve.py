"""Serves a model over HTTP as OpenAI's endpoints, until Ctrl-C.

python -m experiments.serve model=tiny serve.port=8000
"""

from dataclasses import replace

from experiments.launch.app import run_experiment
from experiments.launch.schema import ServeConfig


def main(config: ServeConfig) -> None:
    from experiments.launch.model import arguments, open_llm
    from experiments.launch.variants import compose_models
    from moejax.bench.experiment_run import DRY_RUN
    from moejax.core.errors import ConfigError
    from moejax.serving.tenants import Tenants, read_keys

    section = config.serve
    try:
        from moejax.serving.pool_server import serving_models
        from moejax.serving.run import serve, serving_engine

        if section.replicated:
            from moejax.serving.ray_serve import serving_replicas
    except ModuleNotFoundError as error:
        extra = "ray" if section.replicated else "serve"
        raise ConfigError(f"{error.name} is not installed; pip install 'moejax[{extra}]'") from None

    def ready(name: str, address: str) -> None:
        print(f"serving {name} at {address}; Ctrl-C ends it, after what runs has ended")
        body = f'{{"model": "{name}", "prompt": "The function returns", "max_tokens": 16}}'
        print(f"curl {address}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)

    read_keys("admin_keys_file", section.admin_keys_file)  # before weights are read
    tenants = Tenants(section.api_keys_file)
    configs = compose_models(config) if section.models else {"": config}
    configs = {name: replace(own, engine=tenants.engine(own.engine)) for name, own in configs.items()}
    if DRY_RUN.get() is not None:
        for own in configs.values():
            open_llm(own)
        return
    if section.models:
        models = {name: arguments(own) for name, own in configs.items()}
        return serve(serving_models(models, section), section, ready)
    if section.replicated:
        import jax

        jax.config.update("jax_platforms", "cpu")  # the devices are the replicas'
        return serve(serving_replicas(arguments(configs[""]), section), section, ready)
    with open_llm(configs[""]) as llm:
        name = section.name or (llm.model_dir.name if llm.model_dir else llm.config.family)
        serve(serving_engine(llm, section, name), section, ready)


if __name__ == "__main__":
    run_experiment(main, "serve")
