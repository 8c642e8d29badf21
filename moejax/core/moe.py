"""How the engine runs a model's experts. No JAX here."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from moejax.core.checked import Among, Checked, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError

MoeExecution = Literal["dense", "capacity", "grouped"]
ExpertLayout = Literal["auto", "edf", "efd"]
OverflowPolicy = Literal["drop", "reroute"]

LAYOUTS: tuple[ExpertLayout, ...] = ("edf", "efd")
PRODUCTS = ("auto", "blocks_mixed", "blocks_uniform", "batched", "ragged_dot", "pallas_triton")


@dataclass(frozen=True)
class MoeConfig(Checked, section="engine.moe"):
    """Execution of the expert layers; it changes speed, and with `capacity` also the result.

    `capacity_factor` c gives each expert capacity for ceil(c · T · k / E) of a batch's T·k assignments.
    `grouped_matmul` names the implementation of `grouped`'s products (`moejax.ops.dispatch`); `block_rows`
    fixes the height of "blocks_uniform"'s blocks, and the rows that each expert has in "batched" (None: by
    the mean rows an expert gets).
    `expert_layout` is how the experts' matrices lie in memory: "edf" (gate and up `[E, D, F]`, down
    `[E, F, D]`) or "efd" (each transposed). "auto" is "edf" for a module of its own; `LLM` takes what is
    faster on its platform.
    """

    execution: MoeExecution = "grouped"
    capacity_factor: PositiveNumber = 1.25
    overflow: OverflowPolicy = "drop"
    block_rows: PositiveInt | None = None
    grouped_matmul: Annotated[str, Among(PRODUCTS)] = "auto"
    expert_layout: ExpertLayout = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_rows is not None and self.grouped_matmul == "blocks_mixed":
            raise ConfigError(
                "engine.moe.block_rows fixes the height of all blocks, but grouped_matmul 'blocks_mixed' "
                "takes it from each expert's rows: give one or the other"
            )

    def capacity(self, tokens: int, top_k: int, num_experts: int) -> int:
        """Counts the rows per expert: ceil(factor · N·k / E), at least 1 and at most N."""
        return max(1, min(tokens, math.ceil(self.capacity_factor * tokens * top_k / num_experts)))

    def product(self, tokens: int) -> "Product":
        """Returns what runs the products of a step of `tokens` tokens."""
        return Product(tokens, self.grouped_matmul, self.block_rows)


class Product(NamedTuple):
    """What runs the products of steps of so many tokens: `MoeConfig.grouped_matmul` and `block_rows`."""

    tokens: int
    implementation: str
    rows: int | None

    def __str__(self) -> str:
        return f"{self.tokens}:{self.implementation}" + (f":{self.rows}" if self.rows else "")


@dataclass(frozen=True)
class TunedMoe(MoeConfig, section="engine.moe"):
    """`MoeConfig` with products chosen by the size of the step, by rising tokens: each serves the sizes that
    it is nearest to, as a ratio."""

    products: tuple[Product, ...] = field(kw_only=True)

    @classmethod
    def of(cls, moe: MoeConfig, layout: ExpertLayout, products: Iterable[Product]) -> "TunedMoe":
        """Returns `moe` with another layout and these products."""
        values = {item.name: getattr(moe, item.name) for item in dataclasses.fields(MoeConfig)}
        values["expert_layout"] = layout
        return cls(**values, products=tuple(sorted(products, key=lambda each: each.tokens)))

    @classmethod
    def parse(cls, moe: MoeConfig, choices: str, key: str) -> "TunedMoe":
        """Returns `moe` with what `choices` of another says.

        Raises:
            ConfigError: under `key`, these are not choices.
        """
        try:
            layout, *words = choices.split()
            products = []
            for word in words:
                tokens, name, *rows = word.split(":")
                products.append(Product(int(tokens), name, int(rows[0]) if rows else None))
            known = all(each.implementation in PRODUCTS for each in products)
            sizes = [size for each in products for size in (each.tokens, each.rows) if size is not None]
            if not known or layout not in LAYOUTS or min(sizes) < 1:
                raise ValueError
            return cls.of(moe, layout, products)
        except ValueError:
            example = "'edf 1:auto 128:batched:24'"
            raise ConfigError(f"{key}: {choices!r} is no choice such as {example}") from None

    @property
    def choices(self) -> str:
        """The layout and each product as one text, "edf 1:auto 128:batched:24"."""
        return " ".join([self.expert_layout, *map(str, self.products)])

    def product(self, tokens: int) -> Product:
        return min(self.products, key=lambda each: abs(math.log(each.tokens / tokens)))
