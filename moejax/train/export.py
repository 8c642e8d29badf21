"""A finished run as a Hugging Face directory: weights, tokenizer, held-out sample and model card.

Everything is built in a temporary folder beside the target, read back, measured, and only then renamed.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import nnx

from moejax.checkpoint.hf import in_use, load_pretrained, save_pretrained
from moejax.checkpoint.peft import CONFIG as PEFT_CONFIG
from moejax.checkpoint.peft import merge_adapter, read_adapter, save_adapter
from moejax.core.config import EngineConfig
from moejax.core.errors import OutputError, os_errors
from moejax.core.files import atomic_write_text, dump_json, ensure_writable, whole_folder
from moejax.core.moe import MoeConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.models.decoder import Decoder
from moejax.report.progress import progress
from moejax.train.adapter import factors_of
from moejax.train.card import model_card
from moejax.train.config import WEIGHT_DTYPE, TrainConfig
from moejax.train.evaluate import Evaluator, HeldOut
from moejax.train.loop import TrainResult
from moejax.train.step import model_config
from moejax.train.tokenizer import END_OF_TEXT, save_tokenizer

HELD_OUT_FILE = "held_out.txt"
CARD_FILE = "README.md"
PROMPTS = ("The function returns", "If the file does not exist,", "Python is", "This class is used to")
SAMPLING = tuple(SamplingParams(max_tokens=96, temperature=0.7, seed=i) for i in range(len(PROMPTS)))


@dataclass(frozen=True)
class Exported:
    """Exported model, and the measurement of the rounded weights as they were read back."""

    directory: Path
    held_out: HeldOut
    num_bytes: int


def check_export_dir(directory: str | os.PathLike[str], adapter: bool = False) -> None:
    """Checks the export folder before training, and makes its parent.

    Raises:
        OutputError: the place cannot be written, or holds something that would be lost: no model, or no
            `adapter` where one is exported.
    """
    target = Path(directory)
    ensure_writable(target.parent)
    saved = ("adapter", PEFT_CONFIG) if adapter else ()
    if fault := in_use(target, True, *saved):
        raise OutputError(fault)


def export(
    config: TrainConfig, result: TrainResult, directory: str | os.PathLike[str], command: str
) -> Exported:
    """Writes `directory`, replacing a model that is there; an adapter in PEFT's format.

    Args:
        command: what was typed to train; it goes into the model card.

    Raises:
        OutputError: it cannot be written; what was there before is then untouched.
    """
    target = Path(directory)
    check_export_dir(target, config.adapter.rank > 0)
    if config.adapter.rank:
        return _export_adapter(config, result, target)
    failure = os_errors(OutputError, f"cannot write the model to {target}")
    with failure, progress("exporting"), whole_folder(target) as temporary:
        _write_model(config, result, temporary)
        # From here on everything is measured on what was written, not on what is in memory.
        # The evaluator's own module has the plain expert layout, whatever suits this platform's engine.
        engine = EngineConfig(compile_cache=False, moe=MoeConfig(expert_layout="edf"))
        with LLM(temporary, dtype="float32", engine=engine) as llm:
            assert llm.tokenizer is not None
            stream = llm.tokenizer.encode((temporary / HELD_OUT_FILE).read_text(encoding="utf-8"))
            params = nnx.to_pure_dict(nnx.state(llm.model))
            held_out = Evaluator(config)(params, np.array(stream, np.int32))
            card = model_card(config, command, result, held_out, sample_texts(llm))
        atomic_write_text(temporary / CARD_FILE, card)
    return Exported(target, held_out, sum(path.stat().st_size for path in target.iterdir()))


def _export_adapter(config: TrainConfig, result: TrainResult, target: Path) -> Exported:
    """Writes an adapter, and measures what was written, merged into its base."""
    shape = model_config(config)
    save_adapter(factors_of(result.state.params), shape, target, base=config.adapter.base)
    model = load_pretrained(config.adapter.base, dtype="float32", dequantize=True).model
    merge_adapter(model, read_adapter(target, shape))
    held_out = Evaluator(config)(nnx.to_pure_dict(nnx.state(model)), result.text.held_out)
    return Exported(target, held_out, sum(path.stat().st_size for path in target.iterdir()))


def sample_texts(llm: LLM) -> list[tuple[str, str]]:
    """Returns (prompt, continuation) for each of `PROMPTS`, as they come."""
    outputs = llm.generate(list(PROMPTS), list(SAMPLING))
    return [(prompt, output.outputs[0].text) for prompt, output in zip(PROMPTS, outputs, strict=True)]


def _write_model(config: TrainConfig, result: TrainResult, folder: Path) -> None:
    model = nnx.merge(nnx.graphdef(Decoder(model_config(config))), result.state.params)
    save_pretrained(model, folder, dtype=WEIGHT_DTYPE)
    tokenizer = result.text.tokenizer
    save_tokenizer(tokenizer, folder, max_length=config.model.max_position_embeddings)
    end = tokenizer.token_to_id(END_OF_TEXT)
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    atomic_write_text(folder / "generation_config.json", dump_json(generation, indent=2) + "\n")
    atomic_write_text(folder / HELD_OUT_FILE, result.text.sample)
