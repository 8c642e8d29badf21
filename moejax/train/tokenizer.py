"""A byte-level BPE (Sennrich et al., arXiv 1508.07909, over bytes as in GPT-2) and its Hugging Face files.

Every byte has its own token, so any text survives the round trip. No JAX here.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moejax.core.errors import ConfigError
from moejax.core.files import atomic_write_text, dump_json

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Ids 0, 1, 2. The first is bos, eos and padding."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. The shipped model has seen no chats; the template is there so that chat code has one to run."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns a BPE of `vocab_size` entries, special tokens first. The same texts give the same tokenizer.

    Raises:
        ConfigError: the texts are too short to fill it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the text gives a vocabulary of {tokenizer.get_vocab_size()} tokens only; set vocab_size to that"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: str | os.PathLike[str], *, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json as Hugging Face has them.

    Args:
        max_length: the model's context in tokens.
    """
    folder = Path(directory)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    chat = {"additional_special_tokens": [IM_START, IM_END]}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **special,
        **chat,
        "added_tokens_decoder": {
            str(i): token.__getstate__() for i, token in tokenizer.get_added_tokens_decoder().items()
        },
        "chat_template": CHAT_TEMPLATE,
    }
    atomic_write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    atomic_write_text(folder / "tokenizer_config.json", dump_json(settings, indent=2) + "\n")
    atomic_write_text(folder / "special_tokens_map.json", dump_json({**special, **chat}, indent=2) + "\n")
