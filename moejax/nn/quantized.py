"""A quantized weight in a parameter's place.

Models are built, and their tensors declared, in floating point; `replace_weights` then puts a
`QuantizedWeight` where a format is asked for. Its arrays are declared like every other tensor, so that
loading, sharding, memory accounting and the engine's leaves go on working by declarations.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moejax.core.errors import ConfigError
from moejax.nn.param import ParamSpec, declare, iter_params
from moejax.ops.quantized_matmul import matmul
from moejax.quantization.formats import PARTS, QTensor, WeightFormat
from moejax.sharding.axes import Names
from pallas_kernels.qformats import PACK, tile_codes


class QuantizedWeight(nnx.Module):
    """The arrays of a `QTensor` as parameters, abstract until `set` gives them values.

    Attributes:
        stands_for: declaration of the weight in floating point, `[..., D, F]` in canonical order.
        implementation: of its products (`moejax.ops.quantized_matmul`).
    """

    def __init__(self, spec: ParamSpec, fmt: WeightFormat) -> None:
        shape, axes = spec.canonical_shape, spec.axes
        if spec.transposed:
            axes = (*axes[:-2], axes[-1], axes[-2])
        parts = fmt.parts(shape, axes)

        def part(name: str) -> nnx.Param | None:
            if name not in parts:
                return None
            declared = parts[name]
            part_spec = ParamSpec(declared.shape, declared.axes, declared.dtype, "zeros")
            return declare(part_spec.padded(spec.padding))

        self.values = part("values")
        self.scales = part("scales")
        self.zeros = part("zeros")
        self.tensor_scale = part("tensor_scale")
        self.group_index = part("group_index")
        self.input_scale = part("input_scale")
        self.kept = part("kept")
        self.format, self.pack, self.stands_for = fmt, fmt.pack(shape[-2]), spec
        self.implementation = "xla"

    def parts(self) -> dict[str, nnx.Param]:
        """Returns the parameters that the weight consists of, by the name of the array."""
        params = {name: getattr(self, name) for name in PARTS}
        return {name: param for name, param in params.items() if param is not None}

    def tensor(self) -> QTensor:
        """Returns the weight's arrays as they lie in memory, in a call of the model or outside."""
        arrays = {name: param[...] for name, param in self.parts().items()}
        return QTensor.of(arrays, self.format, self.stands_for.canonical_shape[-2])

    def tile(self) -> None:
        """Puts packed codes into the GPU kernels' tiles (`pallas_kernels.qformats.tile_codes`), those of each
        device on their own: it has whole pieces of 64 inputs."""
        assert self.values is not None
        spec = self.values.get_metadata("spec")
        *lead, F, width = spec.shape
        *axes, out, into = spec.axes
        shape, axes = (*lead, 2 * width // PACK, F, PACK // 2), (*axes, into, out, None)
        self._rewrite(
            tile_codes, replace(spec, shape=shape, axes=axes), lambda *p: (*p[:-2], p[-1], p[-2], None)
        )

    def keep_bits(self) -> None:
        """Keeps float8 codes as their bits, uint8: XLA's CPU code converts float8 number by number."""
        assert self.values is not None
        spec = replace(self.values.get_metadata("spec"), dtype="uint8")
        self._rewrite(lambda codes: jax.lax.bitcast_convert_type(codes, jnp.uint8), spec, lambda *p: p)

    def _rewrite(
        self, rewrite: Callable[[jax.Array], jax.Array], spec: ParamSpec, split: Callable[..., tuple]
    ) -> None:
        """Declares the codes anew and puts them, where there are any, into that form.

        Args:
            split: of the mesh axes by which the codes are split now, those of the new form.
        """
        assert self.values is not None
        value = self.values.get_value()
        self.values = declare(spec)
        if isinstance(value, jax.ShapeDtypeStruct):
            return
        where = value.sharding
        if isinstance(where, NamedSharding):
            parts = [*where.spec, *[None] * (value.ndim - len(where.spec))]
            where = NamedSharding(where.mesh, PartitionSpec(*split(*parts)))
        if where.addressable_devices:
            self.values.set_value(jax.jit(rewrite, out_shardings=where)(value))
        else:  # another process's pipeline stage
            empty = jax.make_array_from_single_device_arrays(
                spec.shape, where, [], dtype=jnp.dtype(spec.dtype)
            )
            self.values.set_value(empty)

    def set(self, tensor: QTensor) -> None:
        """Takes over a tensor's arrays; its format and shapes must be those declared."""
        assert tensor.format == self.format and tensor.pack == self.pack, (tensor.format, self.format)
        for name in PARTS:
            param, array = getattr(self, name), getattr(tensor, name)
            assert (param is None) == (array is None), name
            if param is not None:
                spec = param.get_metadata("spec")
                assert array.shape == spec.shape and array.dtype == spec.dtype, (name, array, spec)
                param.set_value(array)


Weight = nnx.Param | QuantizedWeight


def weight_of(weight: Weight) -> jax.Array | QTensor:
    """Returns the operand of a product, from a plain or a quantized weight."""
    return weight.tensor() if isinstance(weight, QuantizedWeight) else weight[...]


def matmul_of(x: jax.Array, weight: Weight, *, split: Names = (), out_dtype: Any = None) -> jax.Array:
    """Computes `x @ weight` by the weight's implementation; see `moejax.ops.quantized_matmul.matmul`."""
    implementation = weight.implementation if isinstance(weight, QuantizedWeight) else "xla"
    return matmul(x, weight_of(weight), implementation, split=split, out_dtype=out_dtype)


def arrays_of(weight: Weight) -> list[nnx.Param]:
    """Returns the parameters that a weight consists of."""
    return list(weight.parts().values()) if isinstance(weight, QuantizedWeight) else [weight]


def quantized_weights(model: nnx.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yields every quantized weight with the path of the parameter that it stands for."""
    for path, node in sorted(nnx.iter_graph(model), key=lambda item: [str(p) for p in item[0]]):
        if isinstance(node, QuantizedWeight):
            yield ".".join(str(part) for part in path), node


def weight_size(model: nnx.Module) -> tuple[int, int]:
    """Returns the bytes of all parameters with scales and padding, and the model's numbers they stand for."""
    num_bytes = stands = 0
    parts = set()
    for path, weight in quantized_weights(model):
        stands += math.prod(weight.stands_for.true_shape)
        parts |= {f"{path}.{name}" for name in PARTS}
    for path, param in iter_params(model):
        spec = param.get_metadata("spec")
        num_bytes += math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize
        stands += 0 if path in parts else math.prod(spec.true_shape)
    return num_bytes, stands


def replace_weights(model: nnx.Module, formats: Mapping[str, WeightFormat]) -> dict[str, QuantizedWeight]:
    """Puts an abstract `QuantizedWeight` in the place of each named parameter of at least two dimensions.

    Args:
        formats: path of a parameter → format. Those of another pipeline stage are passed over.

    Raises:
        ConfigError: a weight cannot be stored so; nothing is replaced then.
    """
    params = {name: param for name, param in iter_params(model) if name in formats}
    for name, param in params.items():
        spec = param.get_metadata("spec")
        if len(spec.shape) < 2:
            raise ConfigError(f"{name}: a vector is not quantized")
        formats[name].check(name, *spec.canonical_shape[-2:])
    placed = {}
    for name, param in params.items():
        *parents, attribute = name.split(".")
        owner: Any = model
        for part in parents:
            owner = (
                owner[_key(owner, part)] if isinstance(owner, nnx.List | nnx.Dict) else getattr(owner, part)
            )
        weight = QuantizedWeight(param.get_metadata("spec"), formats[name])
        setattr(owner, attribute, weight)
        placed[name] = weight
    return placed


def _key(owner: Any, part: str) -> Any:
    return int(part) if isinstance(owner, nnx.List) else part
