"""Routing traces made up to a law: uniform, Zipf's, bursts, correlations. Numpy only.

Experts are drawn without replacement, the likeliest first: expert e has a rate r_e, and the k least of
Exponential(1) / r_e are the draw (the Gumbel top-k trick in its exponential form; Efraimidis and Spirakis,
2006; Kool, van Hoof and Welling, 2019). So a token's first expert follows the rates exactly, and the k
together follow them less steeply, because no expert can be visited twice. A choice's weight is proportional
to the inverse of its key: positive, falling, normalised.

Rows stand as an engine would have computed them: the prompts of all requests in step 0, then one step for
each further token of all of them. As in the engine, the last token of an output is sampled and never
computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from moejax.core.checked import Among, Checked, Must, PositiveInt, Seed, Share, check
from moejax.core.errors import ConfigError
from moejax.routing.capture import CapturedRequest, RoutingCapture, id_dtype

Kind = Literal["uniform", "zipf", "bursty", "correlated"]
KINDS: tuple[str, ...] = get_args(Kind)

MOST_CHOICES = 2_000_000_000
"""Rows · layers · k of a trace at most: 10 GB of ids and weights."""

_CHUNK = 1 << 22  # keys drawn at a time; part of the recipe, since the random stream goes through it


def _within(low: float, high: float) -> Any:
    """Returns the annotation of a number in [low, high]."""
    return Annotated[float, Must(lambda number: low <= number <= high, f"a number in [{low:g}, {high:g}]")]


_EXPONENT = _within(0, 5)

PARAMS: Mapping[str, Mapping[str, tuple[float | int | None, Any]]] = {
    "uniform": {},
    "zipf": {"exponent": (1.0, _EXPONENT)},
    "bursty": {
        "exponent": (0.0, _EXPONENT),
        "period": (32, PositiveInt),
        "intensity": (16.0, _within(1, 1e6)),
        "hot": (None, PositiveInt),
    },
    "correlated": {
        "exponent": (0.0, _EXPONENT),
        "token_correlation": (0.4, Share),
        "layer_correlation": (0.4, Share),
        "groups": (1, PositiveInt),
        "group_correlation": (0.8, Share),
    },
}
"""Kind → name of a parameter → its default and what it may be; `generate` says what they mean."""


class _Draw(NamedTuple):
    """Choices of every row of every layer: ids `[R, L, k]`, weights float32 `[R, L, k]`."""

    ids: NDArray[Any]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class _Shape(Checked, section="generate"):
    """Shape of a trace; rows go by request, then by position: R = requests · length."""

    num_experts: PositiveInt
    top_k: PositiveInt
    layers: tuple[int, ...]
    requests: PositiveInt
    prompt_len: PositiveInt
    output_len: PositiveInt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.num_experts or self.num_experts > 65_535:
            raise ConfigError(
                f"generate: {self.top_k} of {self.num_experts} experts a token cannot be; at most all of"
                " them, and at most 65,535 experts"
            )
        choices = self.rows * len(self.layers) * self.top_k
        if choices > MOST_CHOICES:
            raise ConfigError(
                f"generate: {self.rows:,} tokens in {len(self.layers)} layers with {self.top_k} experts each"
                f" are {choices:,} choices, at most {MOST_CHOICES:,}; lower generate.requests or the lengths"
            )

    @property
    def length(self) -> int:
        """Tokens of a request that are computed."""
        return self.prompt_len + self.output_len - 1

    @property
    def rows(self) -> int:
        return self.requests * self.length


def generate(
    kind: str,
    *,
    num_experts: int,
    top_k: int,
    layers: int | Sequence[int],
    requests: int,
    prompt_len: int,
    output_len: int,
    seed: int = 0,
    **params: Any,
) -> RoutingCapture:
    """Returns a routing trace of origin "generated"; the same arguments give the same trace.

    Args:
        kind: "uniform": every expert has the same rate.
            "zipf": the expert of rank i (from 1) has the rate i^-`exponent`; each layer ranks its experts
            in an order of its own, drawn from the seed.
            "bursty": as "zipf" (with `exponent` 0: uniform), but for `period` tokens of every sequence `hot`
            of each layer's experts have `intensity` times their rate, then as many others; sequences are in
            lock step, so the whole batch shifts at once. Over many periods the loads even out. `hot` is by
            default an eighth of the experts, at least `top_k` and at most half of them.
            "correlated": with probability `token_correlation` a token visits the very experts of its
            sequence's token before it; with probability `layer_correlation` those which this layer pairs
            with the experts that it visited in the layer before (of the same rank, one to one); else it
            draws from rates as "zipf" (`exponent` 0: uniform), and then with probability `group_correlation`
            within one of the layer's `groups` of experts that go together (1: no groups).
        layers: how many layers have experts, or which of the model's layers they are.
        prompt_len, output_len: tokens of each request.

    Raises:
        ConfigError: an unknown kind or parameter, or a value out of its range.
    """
    check("generate.kind", kind, Annotated[str, Among(KINDS, "kind of trace")])
    given = tuple(range(layers)) if isinstance(layers, int) and not isinstance(layers, bool) else layers
    if isinstance(given, bool) or not isinstance(given, Sequence) or not len(given):
        raise ConfigError(f"generate.layers must be a positive number or a list of layers, got {layers!r}")
    shape = _Shape(num_experts, top_k, tuple(given), requests, prompt_len, output_len)
    check("generate.seed", seed, Seed)
    chosen = check_params(kind, params)
    rng = np.random.default_rng(seed)
    draw = _MAKERS[kind](rng, shape, chosen)
    settings = {"kind": kind, **chosen, "seed": seed, "requests": requests}
    settings |= {"prompt_len": prompt_len, "output_len": output_len}
    return _arrange(shape, draw, {"generator": settings})


def check_params(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all parameters of a kind, those not given with their defaults.

    Raises:
        ConfigError: one that the kind does not have, or out of its range.
    """
    known = PARAMS[kind]
    for name, value in given.items():
        if name not in known:
            others = [other for other, names in PARAMS.items() if name in names]
            whose = f"; {', '.join(others)} {'have' if len(others) > 1 else 'has'} it" if others else ""
            choices = f"it has {', '.join(known)}" if known else "it has no parameters"
            raise ConfigError(f"generate.{name} is no parameter of kind {kind!r}: {choices}{whose}")
        check(f"generate.{name}", value, known[name][1])
    kinds = {name: float if isinstance(default, float) else int for name, (default, _) in known.items()}
    return {
        name: kinds[name](given[name]) if name in given else default for name, (default, _) in known.items()
    }


# -- the laws ----------------------------------------------------------------------------------------------


def _ranks(rng: np.random.Generator, shape: _Shape) -> NDArray[np.int64]:
    """Returns int64 `[L, E]`: each layer's experts by falling popularity."""
    each = np.tile(np.arange(shape.num_experts), (len(shape.layers), 1))
    return rng.permuted(each, axis=1)


def _rates(shape: _Shape, order: NDArray[np.int64], exponent: float) -> NDArray[np.float32]:
    """Returns float32 `[L, E]`: rank i has the rate i^-exponent."""
    by_rank = np.arange(1, shape.num_experts + 1, dtype=np.float64) ** -exponent
    rates = np.empty(order.shape)
    np.put_along_axis(rates, order, np.broadcast_to(by_rank, order.shape), axis=1)
    return rates.astype(np.float32)


def _uniform(rng: np.random.Generator, shape: _Shape, params: Mapping[str, Any]) -> _Draw:
    return _pick(rng, shape, np.ones((1, len(shape.layers), shape.num_experts), np.float32), None)


def _zipf(rng: np.random.Generator, shape: _Shape, params: Mapping[str, Any]) -> _Draw:
    return _pick(rng, shape, _rates(shape, _ranks(rng, shape), params["exponent"])[None], None)


def _bursty(rng: np.random.Generator, shape: _Shape, params: Mapping[str, Any]) -> _Draw:
    E, L = shape.num_experts, len(shape.layers)
    hot = params["hot"] or min(max(E // 8, shape.top_k, 1), max(E // 2, 1))
    if 2 * hot > E:
        raise ConfigError(
            f"generate.hot={hot} of {E} experts: with more than half of them hot, a burst cannot shift to"
            " others"
        )
    order = _ranks(rng, shape)
    base = _rates(shape, order, params["exponent"])
    turn = rng.permuted(np.tile(np.arange(E), (L, 1)), axis=1)
    phases = -(-shape.length // params["period"])
    rates = np.repeat(base[None], phases, axis=0)
    for phase in range(phases):
        chosen = turn[:, (phase * hot + np.arange(hot)) % E]
        factor = np.ones((L, E), np.float32)
        np.put_along_axis(factor, chosen, np.float32(params["intensity"]), axis=1)
        rates[phase] *= factor
    position = np.tile(np.arange(shape.length), shape.requests)
    return _pick(
        rng, shape, rates, np.broadcast_to((position // params["period"])[:, None], (len(position), L))
    )


def _correlated(rng: np.random.Generator, shape: _Shape, params: Mapping[str, Any]) -> _Draw:
    E, L, R = shape.num_experts, len(shape.layers), shape.rows
    token, layer, groups = params["token_correlation"], params["layer_correlation"], params["groups"]
    if token + layer > 1:
        raise ConfigError(
            f"generate.token_correlation={token:g} and layer_correlation={layer:g} are shares of the tokens:"
            " together at most 1"
        )
    if E // groups < shape.top_k:
        raise ConfigError(
            f"generate.groups={groups}: {E} experts in so many groups are {E // groups} in the smallest, and"
            f" a token visits {shape.top_k}; at most {E // shape.top_k} groups"
        )
    order = _ranks(rng, shape)
    fresh = _grouped(rng, shape, _rates(shape, order, params["exponent"]), order, params)
    source = rng.random((R, L), np.float32)
    copies = (source < token).reshape(shape.requests, shape.length, L)
    copies[:, 0] = False
    maps = (source >= token) & (source < token + layer)
    # A token that copies stands for the last one before it that does not.
    places = np.where(copies, 0, np.arange(shape.length)[None, :, None])
    places = np.maximum.accumulate(places, axis=1)
    places = (places + shape.length * np.arange(shape.requests)[:, None, None]).reshape(R, L)
    ids, weights = fresh
    for at in range(L):
        if at:
            pair = np.empty(E, ids.dtype)
            pair[order[at - 1]] = order[at]
            mapped = maps[:, at]
            ids[mapped, at] = pair[ids[mapped, at - 1]]
            weights[mapped, at] = weights[mapped, at - 1]
        ids[:, at], weights[:, at] = ids[places[:, at], at], weights[places[:, at], at]
    return fresh


def _grouped(
    rng: np.random.Generator,
    shape: _Shape,
    rates: NDArray[np.float32],
    order: NDArray[np.int64],
    params: Mapping[str, Any],
) -> _Draw:
    """Draws of which a share goes within one of a layer's groups; a group has every `groups`-th rank, so that
    groups are about equally popular, and a layer's pairing with the next keeps them together."""
    groups, share = params["groups"], params["group_correlation"]
    if groups == 1 or share == 0:
        return _pick(rng, shape, rates[None], None)
    E, L = shape.num_experts, len(shape.layers)
    group_of = np.empty((L, E), np.int64)
    np.put_along_axis(group_of, order, np.broadcast_to(np.arange(E) % groups, (L, E)), axis=1)
    members = group_of[None] == np.arange(groups)[:, None, None]
    table = np.concatenate([rates[None], np.where(members, rates[None], np.float32(0))])
    ends = np.cumsum(table[1:].sum(axis=2, dtype=np.float64), axis=0)
    ends /= ends[-1]
    chance = rng.random((shape.rows, L))
    variant = 1 + (chance[None] > ends[:-1, None, :]).sum(axis=0)
    variant[rng.random((shape.rows, L)) >= share] = 0
    return _pick(rng, shape, table, variant)


def _pick(
    rng: np.random.Generator, shape: _Shape, rates: NDArray[np.float32], variant: NDArray[Any] | None
) -> _Draw:
    """Returns k different experts for every row and layer.

    Args:
        rates: `[V, L, E]`; 0 for an expert that must not be drawn.
        variant: int `[R, L]`, which of the V each row takes in each layer; None: the only one.
    """
    R, L, E, k = shape.rows, len(shape.layers), shape.num_experts, shape.top_k
    ids = np.empty((R, L, k), id_dtype(E))
    weights = np.empty((R, L, k), np.float32)
    with np.errstate(divide="ignore"):
        scale = np.float32(1) / rates
    size = max(1, _CHUNK // (L * E))
    for first in range(0, R, size):
        part = slice(first, min(first + size, R))
        keys = rng.standard_exponential((part.stop - first, L, E), np.float32)
        np.maximum(keys, np.float32(1e-9), out=keys)
        keys *= scale[0] if variant is None else scale[variant[part], np.arange(L)]
        least = (
            np.argpartition(keys, k - 1, axis=-1)[..., :k]
            if k < E
            else np.broadcast_to(np.arange(E), keys.shape)
        )
        values = np.take_along_axis(keys, least, axis=-1)
        rising = np.argsort(values, axis=-1)
        ids[part] = np.take_along_axis(least, rising, axis=-1)
        inverse = 1 / np.take_along_axis(values, rising, axis=-1)
        weights[part] = inverse / inverse.sum(axis=-1, keepdims=True)
    return _Draw(ids, weights)


_MAKERS: Mapping[str, Callable[[np.random.Generator, _Shape, Mapping[str, Any]], _Draw]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "bursty": _bursty,
    "correlated": _correlated,
}


def _arrange(shape: _Shape, draw: _Draw, meta: Mapping[str, Any]) -> RoutingCapture:
    """Puts rows, by request and position, in the order of steps."""
    at = np.arange(shape.rows).reshape(shape.requests, shape.length)
    order = np.concatenate([at[:, : shape.prompt_len].reshape(-1), at[:, shape.prompt_len :].T.reshape(-1)])
    position = (order % shape.length).astype(np.int32)
    return RoutingCapture(
        ids=draw.ids[order],
        weights=draw.weights[order],
        step=np.maximum(position - shape.prompt_len + 1, 0).astype(np.int32),
        request=(order // shape.length).astype(np.int32),
        sample=np.zeros(shape.rows, np.int32),
        position=position,
        prefill=position < shape.prompt_len,
        requests=tuple(
            CapturedRequest(f"generated-{number}", "", shape.prompt_len) for number in range(shape.requests)
        ),
        layers=shape.layers,
        num_experts=shape.num_experts,
        origin="generated",
        meta=meta,
    )
