"""Reading a Hugging Face `config.json` field by field, so that nothing in it is ignored by accident.

A family takes the fields it understands; `finish` then raises for any field left over that could change
the computation.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moejax.core.checked import PositiveInt, check
from moejax.core.config import RopeConfig
from moejax.core.errors import ConfigError

# Bookkeeping, training-only or output-only fields: they do not change what inference computes.
NEUTRAL = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
    "attention_dropout", "auto_map", "chunk_size_feed_forward", "dtype", "finetuning_task", "hidden_dropout",
    "id2label", "label2id", "model_type", "output_attentions", "output_hidden_states", "output_router_logits",
    "prefix", "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "is_llama_config", "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip

# Fields that are harmless at one value only.
ONLY_AT: dict[str, Any] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
}

ROPE_KEYS = {
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
    "short_mscale", "long_mscale",
}  # fmt: skip


@dataclass(eq=False)
class HfFields:
    """A `config.json` whose fields are taken one at a time."""

    raw: dict[str, Any]
    source: str
    taken: set[str] = field(default_factory=set)

    def take(self, *names: str, default: Any = None) -> Any:
        """Takes the first of `names` that is present and not null, else `default`. All count as taken."""
        self.taken.update(names)
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        return default

    def require(self, *names: str) -> Any:
        """Takes a field as `take` does; a missing one is a `ConfigError`."""
        value = self.take(*names)
        if value is None:
            raise ConfigError(f"{self.source}: missing field {' or '.join(map(repr, names))}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Takes a whole number of at least 1; another is a `ConfigError` that names the field."""
        value = self.require(name) if default is None else self.take(name, default=default)
        check(name, value, PositiveInt)
        return int(value)

    def only(self, name: str, value: Any) -> None:
        """Accepts a field at one value; any other is a `ConfigError` that names it."""
        self.taken.add(name)
        given = self.raw.get(name)
        if given is not None and given != value:
            raise ConfigError(
                f"{self.source}: {name}={given!r} changes the computation and is not implemented "
                f"(only {value!r} is)"
            )

    def only_at(self, **values: Any) -> None:
        """Accepts several fields as `only` does, each at one value."""
        for name, value in values.items():
            self.only(name, value)

    def rope(
        self,
        *,
        default_theta: float,
        max_position_embeddings: int,
        interleaved: bool = False,
        partial_rotary_factor: float | None = None,
        alpha_head_dim: int | None = None,
    ) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

        Args:
            interleaved: as in `RopeConfig`; the family's.
            partial_rotary_factor: the family's default; None: it always rotates whole heads.
            alpha_head_dim: width of the family's heads, if its "dynamic" has an `alpha` for the base.
        """
        theta = self.take("rope_theta", default=default_theta)
        new, old = self.raw.get("rope_parameters"), self.raw.get("rope_scaling")
        if new is not None and old is not None and new != old:
            raise ConfigError(f"{self.source}: rope_parameters and rope_scaling differ; remove one of them")
        fields = dict(self.take("rope_parameters", "rope_scaling", default={}))
        kind: Any = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
        fields.pop("type", None)
        theta = fields.pop("rope_theta", theta)
        share, whole = fields.pop("partial_rotary_factor", None), partial_rotary_factor is None
        if whole and share not in (None, 1.0):
            raise ConfigError(f"{self.source}: partial_rotary_factor other than 1.0 is not implemented")
        default = 1.0 if whole else self.take("partial_rotary_factor", default=partial_rotary_factor)
        alpha = fields.pop("alpha", None) if alpha_head_dim else None
        if kind == "dynamic" and alpha and alpha_head_dim:
            theta *= alpha ** (alpha_head_dim / (alpha_head_dim - 2))
            kind, fields = "default", {}
        strange = sorted(set(fields) - ROPE_KEYS)
        if strange:
            raise ConfigError(
                f"{self.source}: rope field(s) {', '.join(strange)} are not implemented "
                f"(known: {', '.join(sorted(ROPE_KEYS))})"
            )
        fields = {name: value for name, value in fields.items() if value is not None}
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        if kind == "longrope" and (original := self.take("original_max_position_embeddings")):
            fields.setdefault("original_max_position_embeddings", original)
        if kind in ("yarn", "llama3", "longrope"):
            fields.setdefault("original_max_position_embeddings", max_position_embeddings)
            if "factor" not in fields:
                fields["factor"] = max_position_embeddings / fields["original_max_position_embeddings"]
        elif kind in ("linear", "dynamic") and "factor" not in fields:
            raise ConfigError(f"{self.source}: rope_type {kind!r} needs a factor")
        share = float(default if share is None else share)
        return RopeConfig(kind, float(theta), **fields, partial_rotary_factor=share, interleaved=interleaved)

    def special_tokens(self) -> dict[str, Any]:
        """Returns bos, eos (one or several) and pad ids as `ModelConfig` keeps them."""
        eos = self.take("eos_token_id", default=())
        eos = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        return {
            "bos_token_id": self.take("bos_token_id"),
            "eos_token_ids": eos,
            "pad_token_id": self.take("pad_token_id"),
        }

    def dtype(self) -> str:
        """Returns the dtype that the checkpoint says it is in; float32 if it does not say."""
        name = str(self.take("dtype", "torch_dtype", default="float32"))
        return name.removeprefix("torch.")

    def finish(self) -> None:
        """Raises `ConfigError` naming every field that was not taken and is not known to be harmless."""
        for name, value in ONLY_AT.items():
            if name not in self.taken:
                self.only(name, value)
        left = [
            name
            for name, value in self.raw.items()
            if name not in self.taken and name not in NEUTRAL and value is not None
        ]
        if left:
            shown = ", ".join(f"{name}={self.raw[name]!r}" for name in sorted(left))
            raise ConfigError(
                f"{self.source}: field(s) not implemented for model_type "
                f"{self.raw.get('model_type')!r}: {shown}. "
                "They may change the computation; if they do not, remove them from config.json"
            )


def sparse_layers(fields: HfFields, num_layers: int) -> tuple[bool, ...]:
    """Returns which layers hold experts, from Qwen's `decoder_sparse_step` and `mlp_only_layers`."""
    step = int(fields.take("decoder_sparse_step", default=1))
    dense = set(fields.take("mlp_only_layers", default=()))
    strange = sorted(i for i in dense if not isinstance(i, int) or not 0 <= i < num_layers)
    if strange:
        raise ConfigError(f"{fields.source}: mlp_only_layers {strange} outside 0..{num_layers - 1}")
    if step < 1:
        raise ConfigError(f"{fields.source}: decoder_sparse_step must be at least 1, got {step}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def layer_windows(
    fields: HfFields, layers: int, window: int | None, sliding: Iterable[bool]
) -> tuple[int | None, ...]:
    """Returns each layer's attention window: by `layer_types`, and without it, in the layers of `sliding`."""
    names = {True: "sliding_attention", False: "full_attention"}
    types = fields.take("layer_types") or [names[each] for each in sliding]
    if set(types) - set(names.values()) or len(types) != layers:
        raise ConfigError(
            f"{fields.source}: layer_types must name 'full_attention' or 'sliding_attention' for each of "
            f"{layers} layers, got {types!r}"
        )
    if names[True] in types and not window:
        raise ConfigError(
            f"{fields.source}: layer_types has sliding_attention, but sliding_window (or use_sliding_window) "
            "is off"
        )
    return tuple(window if kind == names[True] else None for kind in types)


def layer_types(windows: Iterable[int | None]) -> list[str]:
    """Inverts `layer_windows`."""
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Returns `rope_parameters` as of transformers 5; earlier versions read `rope_theta`/`rope_scaling`."""
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    used: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": (
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "truncate",
        ),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "longrope": (
            "factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor",
            "short_mscale", "long_mscale",
        ),
    }  # fmt: skip
    for name in used[rope.kind]:
        if (value := getattr(rope, name)) is not None:
            out[name] = list(value) if isinstance(value, tuple) else value
    if rope.partial_rotary_factor != 1.0:
        out["partial_rotary_factor"] = rope.partial_rotary_factor
    return out
