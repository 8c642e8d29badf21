"""Text in, text out.

python -m experiments.generate 'prompts=["The function returns"]' sampling.max_tokens=64 stream=true
"""

from experiments.launch.app import output_dir, run_experiment
from experiments.launch.schema import GenerateConfig


def main(config: GenerateConfig) -> None:
    from experiments.launch.model import open_llm
    from moejax.engine.console import generate_to_console
    from moejax.results.result import print_ending

    with open_llm(config) as llm:
        counts = generate_to_console(
            llm,
            list(config.prompts),
            config.sampling,
            stream=config.stream,
            chat=config.chat,
            out_dir=output_dir(),
        )
    print_ending("generate", output_dir(), counts)


if __name__ == "__main__":
    run_experiment(main, "generate", ahead=True)
