"""Serves a model over HTTP as OpenAI's endpoints, until Ctrl-C.

python -m experiments.serve model=tiny serve.port=8000
"""

import functools

from experiments.launch.app import run_experiment
from experiments.launch.schema import ServeConfig


def main(config: ServeConfig) -> None:
    from experiments.launch.model import arguments, open_llm
    from experiments.launch.variants import compose_models
    from moejax.core.errors import ConfigError

    try:
        from moejax.serving.run import serve, serve_models, serve_replicas
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'moejax[serve]'") from None
    for field in ("api_keys_file", "admin_keys_file"):  # before weights are read
        config.serve.keys(field)

    def ready(name: str, address: str) -> None:
        print(f"serving {name} at {address}; Ctrl-C ends it, after what runs has ended")
        body = f'{{"model": "{name.split(", ")[0]}", "prompt": "The function returns", "max_tokens": 16}}'
        print(f"curl {address}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)

    if config.serve.models:
        models = {name: arguments(own) for name, own in compose_models(config).items()}
        serve_models(models, config.serve, functools.partial(ready, ", ".join(models)))
        return
    if config.serve.replicated:
        serve_replicas(arguments(config), config.serve, ready)
        return
    with open_llm(config) as llm:
        name = config.serve.name or (llm.model_dir.name if llm.model_dir else llm.config.family)
        serve(llm, config.serve, name, functools.partial(ready, name))


if __name__ == "__main__":
    run_experiment(main, "serve")
