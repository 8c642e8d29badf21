"""Serves a model over HTTP as OpenAI's endpoints, until Ctrl-C.

python -m experiments.serve model=tiny serve.port=8000
"""

from dataclasses import replace

from experiments.launch.app import run_experiment
from experiments.launch.schema import ServeConfig


def main(config: ServeConfig) -> None:
    from experiments.launch.model import open_llm
    from moejax.core.errors import ConfigError
    from moejax.serving.tenants import Tenants, read_keys

    try:
        from moejax.serving.run import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'moejax[serve]'") from None
    read_keys("admin_keys_file", config.serve.admin_keys_file)  # before weights are read
    config = replace(config, engine=Tenants(config.serve.api_keys_file).engine(config.engine))
    with open_llm(config) as llm:
        name = config.serve.name or (llm.model_dir.name if llm.model_dir else llm.config.family)

        def ready(address: str) -> None:
            print(f"serving {name} at {address}; Ctrl-C ends it, after what runs has ended")
            body = f'{{"model": "{name}", "prompt": "The function returns", "max_tokens": 16}}'
            print(
                f"curl {address}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True
            )

        serve(llm, config.serve, name, ready)


if __name__ == "__main__":
    run_experiment(main, "serve")
