"""How the engine runs a model's experts. No JAX here."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from moejax.core.checked import Among, Checked, OpenShare, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError

MoeExecution = Literal["dense", "capacity", "grouped"]
ExpertLayout = Literal["auto", "edf", "efd"]
OverflowPolicy = Literal["drop", "reroute"]
RoutingMethod = Literal["top_k", "top_p", "confidence", "ratio", "batch", "bias"]

LAYOUTS: tuple[ExpertLayout, ...] = ("edf", "efd")
PRODUCTS = ("auto", "blocks_mixed", "blocks_uniform", "batched", "ragged_dot", "pallas_triton")


@dataclass(frozen=True)
class RoutingPolicy(Checked, section="engine.moe.routing"):
    """Which experts a token visits at inference: the model's own k, fewer, or others. All but "top_k" change
    the result. Weights are those that the model gives to the experts that are left, renormalised where it
    renormalises.

    Attributes:
        method: "top_k" runs the k experts that the model's router chooses. Three leave out of these k, token
            by token: "top_p" all after those that together have `threshold` of the probability (a sigmoid
            router's scores over their sum; Huang et al., arXiv 2403.07652); "confidence" all
            but `min_experts` where the best one has `threshold` of it (after Li et al., EMNLP 2023);
            "ratio" those below `threshold` times the best one's (Lu et al., arXiv 2402.14800). Two choose by
            what else is in the step: "batch" gives a token its best `min_experts`, and fills up to k with
            the best ones that some token of the step visits in any case (Oncescu et al., arXiv 2511.02237);
            "bias" adds to each expert's score a bias, which rises by `rate` after every step in which the
            expert had less than the mean load, and falls where it had more (Wang et al., arXiv 2408.15664);
            a step that was launched before is told nothing of it.
        threshold: see `method`.
        min_experts: experts that a token has in any case.
        max_experts: what k is, under every method; None: the model's own.
        rate: see `method`; scores are probabilities, or a sigmoid's.
    """

    method: RoutingMethod = "top_k"
    threshold: OpenShare = 0.5
    min_experts: PositiveInt = 1
    max_experts: PositiveInt | None = None
    rate: PositiveNumber = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_experts is not None and self.min_experts > self.max_experts:
            raise ConfigError(
                f"{self._section}min_experts={self.min_experts} exceeds max_experts={self.max_experts}"
            )

    @property
    def changed(self) -> str | None:
        """The key and value by which it is not the model's own choice, None if it is."""
        if self.method != "top_k":
            return f"engine.moe.routing.method={self.method}"
        return None if self.max_experts is None else f"engine.moe.routing.max_experts={self.max_experts}"

    @property
    def by_batch(self) -> bool:
        """Whether a token's experts depend on the other tokens of a step."""
        return self.method in ("batch", "bias")


@dataclass(frozen=True)
class MoeConfig(Checked, section="engine.moe"):
    """Execution of the expert layers; it changes speed, and with `capacity` and `routing` also the result.

    `capacity_factor` c gives each expert capacity for ceil(c · T · k / E) of a batch's T·k assignments.
    `grouped_matmul` names the implementation of `grouped`'s products (`moejax.ops.dispatch`); `block_rows`
    fixes the height of "blocks_uniform"'s blocks, and the rows that each expert has in "batched" (None: by
    the mean rows an expert gets).
    `expert_layout` is how the experts' matrices lie in memory: "edf" (gate and up `[E, D, F]`, down
    `[E, F, D]`) or "efd" (each transposed). "auto" is "edf" for a module of its own; `LLM` takes what is
    faster on its platform. `routing`: see `RoutingPolicy`.
    """

    execution: MoeExecution = "grouped"
    capacity_factor: PositiveNumber = 1.25
    overflow: OverflowPolicy = "drop"
    block_rows: PositiveInt | None = None
    grouped_matmul: Annotated[str, Among(PRODUCTS)] = "auto"
    expert_layout: ExpertLayout = "auto"
    routing: RoutingPolicy = field(default_factory=RoutingPolicy)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_rows is not None and self.grouped_matmul == "blocks_mixed":
            raise ConfigError(
                "engine.moe.block_rows fixes the height of all blocks, but grouped_matmul 'blocks_mixed' "
                "takes it from each expert's rows: give one or the other"
            )

    @property
    def by_batch(self) -> str | None:
        """The key and value by which a token's result depends on the other tokens of a step, None if none."""
        if self.execution == "capacity":
            return "engine.moe.execution=capacity: what an expert drops"
        method = self.routing.method
        return f"engine.moe.routing.method={method}: who is chosen" if self.routing.by_batch else None

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
