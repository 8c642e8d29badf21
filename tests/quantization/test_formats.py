"""Names, sizes, parts and refusals of weight formats."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from moejax.core.errors import ConfigError
from moejax.quantization.formats import (
    KNOWN_FORMATS,
    MXFP4,
    NVFP4,
    QTensor,
    WeightFormat,
    default_scale_dtype,
    parse_format,
)


def all_formats() -> list[WeightFormat]:
    """Every combination that is a format."""
    found = []
    for numbers, (granularity, group), symmetric, scale, acts, indexed, sparse in itertools.product(
        ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "bfloat16", "float32"),
        (("tensor", 0), ("channel", 0), ("group", 16), ("group", 64), ("block", 128)),
        (True, False),
        ("float32", "bfloat16", "float16", "e8m0", "float8_e4m3fn"),
        ("none", "dynamic", "static"),
        (False, True),
        (False, True),
    ):
        try:
            found.append(WeightFormat(numbers, granularity, group, symmetric, scale, acts, indexed, sparse))
        except ConfigError:
            continue
    return found


def test_names_are_unique_and_read_back():
    formats = [*all_formats(), MXFP4, NVFP4]
    names = {fmt.name: fmt for fmt in formats}
    assert len(names) == len(set(formats))
    for name, fmt in names.items():
        assert parse_format(name) == fmt, name


def test_every_known_name_is_a_format():
    for name in KNOWN_FORMATS:
        fmt = parse_format(name)
        assert fmt.scale_dtype == default_scale_dtype(fmt.granularity) or fmt in (MXFP4, NVFP4)
    assert parse_format("fp8_block128") == WeightFormat("float8_e4m3fn", "block", 128)
    assert parse_format("w8a8_static") == WeightFormat("int8", activations="static")
    assert parse_format("int4_g64_asym") == WeightFormat("int4", "group", 64, False, "bfloat16")
    assert parse_format("fp8_a8") == WeightFormat("float8_e4m3fn", activations="dynamic")
    assert parse_format("int8_tensor").granularity == "tensor"


SIZES = {
    # bits of a weight, of a scale, of a zero point; D, F; scales; other bits.
    "int8": (8, 32, 0, 256, 96, 96, 0),
    "int8_asym": (8, 32, 8, 256, 96, 96, 0),
    "int8_tensor": (8, 32, 0, 256, 96, 1, 0),
    "int8_g64": (8, 16, 0, 256, 96, 4 * 96, 0),
    "int4": (4, 32, 0, 70, 96, 96, 0),
    "int4_g32": (4, 16, 0, 96, 96, 3 * 96, 0),
    "int4_g64_asym": (4, 16, 8, 256, 96, 4 * 96, 0),
    "int4_g128": (4, 16, 0, 256, 96, 2 * 96, 0),
    "int4_g64_indexed": (4, 16, 0, 256, 96, 4 * 96, 32 * 256),
    "fp8": (8, 32, 0, 256, 96, 96, 0),
    "fp8_e5m2": (8, 32, 0, 256, 96, 96, 0),
    "fp8_block128": (8, 32, 0, 300, 200, 3 * 2, 0),
    "w8a8_static": (8, 32, 0, 256, 96, 96, 32),
    "mxfp4": (4, 8, 0, 256, 96, 8 * 96, 0),
    "nvfp4": (4, 8, 0, 256, 96, 16 * 96, 32),
    # Half of the codes, and two bits for each of them.
    "bf16_2of4": (9, 32, 0, 256, 96, 1, 0),
    "float32_2of4": (17, 32, 0, 256, 96, 1, 0),
    "int8_2of4": (5, 32, 0, 256, 96, 96, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_bits_held_follow_from_bit_widths(name):
    bits, scale, zero, D, F, scales, other = SIZES[name]
    fmt = parse_format(name)
    assert fmt.bits_held((D, F)) == bits * D * F + (scale + zero) * scales + other
    assert fmt.bits_held((3, D, F)) == 3 * fmt.bits_held((D, F))
    assert fmt.scale_shape(D, F)[0] * fmt.scale_shape(D, F)[1] == scales


def test_a_tensor_holds_what_its_format_says():
    fmt = parse_format("int4_g64_asym")
    parts = fmt.parts((3, 128, 40))
    arrays = {name: jax.ShapeDtypeStruct(part.shape, part.dtype) for name, part in parts.items()}
    absent = dict.fromkeys(("tensor_scale", "group_index", "input_scale"))
    q = QTensor(**arrays, **absent, format=fmt, pack=fmt.pack(128))
    assert q.shape == (3, 128, 40)
    assert q.nbytes * 8 == fmt.bits_held((3, 128, 40))


def test_experts_of_a_tensor_are_sliced_by_tree_map():
    fmt = parse_format("int8")
    q = QTensor(jnp.zeros((4, 5, 6), jnp.int8), jnp.ones((4, 1, 5)), None, None, None, None, fmt)
    one = jax.tree.map(lambda a: a[2], q)
    assert one.shape == (6, 5) and one.format == fmt and one.zeros is None


def test_parts_are_split_as_the_weight_is():
    """Scales go with the inputs where these are grouped in order, with the outputs unless one is all."""
    shape, axes = (8, 256, 512), ("expert", "embed", "mlp")
    for name, scale_axes in (
        ("int8", ("expert", None, "mlp")),
        ("int8_tensor", ("expert", None, None)),
        ("int4_g64_asym", ("expert", "embed", "mlp")),
        ("int4_g64_indexed", ("expert", None, "mlp")),
        ("fp8_block128", ("expert", "embed", "mlp")),
    ):
        parts = parse_format(name).parts(shape, axes)
        assert parts["values"].axes == ("expert", "mlp", "embed"), name
        assert parts["scales"].axes == scale_axes, name
        for part in parts.values():
            assert len(part.axes) == len(part.shape)
    assert parse_format("int4_g64_indexed").parts(shape, axes)["group_index"].axes == ("expert", "embed")
    assert parse_format("nvfp4").parts(shape, axes)["tensor_scale"].axes == ("expert", None, None)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"q_proj: groups of 128 do not divide its 96 inputs; use 32 or 16"):
        parse_format("int4_g128").check("q_proj", 96, 8)
    with pytest.raises(ConfigError, match="use a format per channel"):
        parse_format("int8_g64").check("q_proj", 100, 8)
    with pytest.raises(ConfigError, match="even number of inputs, not 7"):
        parse_format("int4").check("q_proj", 7, 8)
    with pytest.raises(ConfigError, match=r"2of4 needs a multiple of 8 inputs, .* not 12"):
        parse_format("bf16_2of4").check("q_proj", 12, 8)
    parse_format("fp8_block128").check("q_proj", 100, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": "int3"}, "numbers: unknown value 'int3'; did you mean 'int8'"),
        ({"numbers": "int8", "granularity": "row"}, "granularity: unknown value"),
        ({"numbers": "int8", "granularity": "group"}, "with group 0"),
        ({"numbers": "int8", "group": 64}, "'channel' with group 64"),
        ({"numbers": "float8_e4m3fn", "symmetric": False}, "has no zero points"),
        ({"numbers": "int4", "activations": "dynamic"}, "quantized to 8 bits"),
        ({"numbers": "int4", "indexed": True}, "a group index needs groups"),
        ({"numbers": "int4", "scale_dtype": "float64"}, "scale_dtype: unknown value 'float64'"),
    ],
)
def test_what_is_no_format_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        WeightFormat(**options)


@pytest.mark.parametrize("name", ["int5", "int4_h64", "fp8_asym_x", "int4_g", "mxfp4_g32"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"quant\.format: unknown format"):
        parse_format(name)
