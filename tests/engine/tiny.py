"""The small models and the tokenizer that the engine's tests run on, and the plainest way to use them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moejax.checkpoint.hf import save_pretrained
from moejax.core.config import ModelConfig
from moejax.models.decoder import Decoder
from tests.examples import examples
from tests.model_shapes import ONE_LAYER, TWO_LAYERS

# The same examples each run: a test that fails by chance tells nobody anything.
PROPERTY = settings(
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
VOCAB = 320
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = (
    "The router sends each token to a few experts. Experts are small networks; the router is smaller still.",
    "naïve café, Größe, привет, 你好世界, 🙂🙃 and ½ of a cup",
    "def route(tokens):\n    return [expert for expert in experts if expert.wants(tokens)]\n",
)


def main_config(**changes: Any) -> ModelConfig:
    """Two Qwen3-MoE layers; logits well apart, so that rounding does not change the greedy token."""
    return TWO_LAYERS.replace(vocab_size=VOCAB, eos_token_ids=(0,)).replace(**changes)


def windowed_config() -> ModelConfig:
    """Multi-query attention with a short sliding window, and a dense layer before the routed one."""
    return main_config(num_kv_heads=1, sliding_windows=(5, 5), moe_layers=(False, True))


def small_config(**changes: Any) -> ModelConfig:
    """One layer: the fastest to compile."""
    return ONE_LAYER.replace(vocab_size=VOCAB, eos_token_ids=(0,)).replace(**changes)


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE: tokens often hold part of a character, as in GPT-2, Qwen and OLMoE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's way, as in Mixtral: words with ▁ for a space, and unknown characters byte by byte."""
    words = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "a", "b", "c", "▁a", "▁b", "é", "ab"]
    vocab = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b"), ("a", "b")], unk_token="<unk>")
    model.byte_fallback, model.fuse_unk = True, True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_tokenizer(directory: Path, *, chat_template: str | None = CHATML) -> None:
    """`tokenizer.json` and `tokenizer_config.json` beside a model."""
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": SPECIALS[0], "pad_token": {"content": SPECIALS[0]}}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_model(directory: Path, config: ModelConfig, *, seed: int = 0, tokenizer: bool = True) -> Path:
    """A Hugging Face directory with random weights."""
    save_pretrained(Decoder(config, seed=seed), directory)
    if tokenizer:
        write_tokenizer(directory)
    return directory


class FullForward:
    """Logits by the model's whole forward pass, with no cache: what every step is compared with."""

    def __init__(self, model: Decoder, length: int = 32) -> None:
        graph, state = nnx.split(model)
        self.length, self._state = length, state
        self._greedy: dict[tuple[int, ...], list[int]] = {}  # tests ask for the same prompts' again and again
        # Right padding is invisible to what comes before it: attention is causal.
        self._forward = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, return_routing=True))

    def _run(self, tokens: list[int]) -> Any:
        padded = np.zeros((1, self.length), np.int32)
        padded[0, : len(tokens)] = tokens
        return self._forward(self._state, jnp.asarray(padded))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 `[len(tokens), V]`."""
        return np.asarray(self._run(tokens)[0])[0, : len(tokens)]

    def experts(self, tokens: list[int]) -> list[np.ndarray | None]:
        """Each layer's choice, int32 `[len(tokens), k]`; None for a dense layer."""
        traces = self._run(tokens)[1]
        return [None if t is None else np.asarray(t.ids)[0, : len(tokens)] for t in traces]

    def weights(self, tokens: list[int]) -> list[np.ndarray | None]:
        """What each layer gives these experts, float32 `[len(tokens), k]`; None for a dense layer."""
        traces = self._run(tokens)[1]
        return [None if t is None else np.asarray(t.weights)[0, : len(tokens)] for t in traces]

    def greedy(self, prompt: list[int], steps: int) -> list[int]:
        """The likeliest token, appended and computed anew `steps` times; what is known already is kept."""
        known = list(self._greedy.get(tuple(prompt), ()))
        while len(known) < steps:
            known.append(int(self.logits([*prompt, *known])[-1].argmax()))
            self._greedy[tuple(prompt)] = known
        return known[:steps]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64, over the last axis."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
