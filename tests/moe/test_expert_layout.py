"""The transposed expert layout is the same model: same values from a seed, from a file and in a file."""

import numpy as np
import pytest

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from tests.decoding import forward, random_model
from tests.model_shapes import ONE_LAYER

EXECUTIONS = (
    MoeConfig(execution="dense"),
    MoeConfig(execution="capacity", capacity_factor=8.0),
    MoeConfig(block_rows=1),
    MoeConfig(block_rows=4),
    MoeConfig(grouped_matmul="blocks_mixed"),
    MoeConfig(grouped_matmul="ragged_dot"),
)


def layout(config: MoeConfig, name: str) -> MoeConfig:
    return MoeConfig(**{**vars(config), "expert_layout": name})


@pytest.mark.parametrize("moe", EXECUTIONS, ids=lambda m: f"{m.execution}-{m.grouped_matmul}-{m.block_rows}")
def test_same_logits_in_both_layouts(moe):
    tokens = np.random.default_rng(0).integers(0, ONE_LAYER.vocab_size, (2, 7))
    plain = np.asarray(forward(random_model(ONE_LAYER, layout(moe, "edf")), tokens)[0])
    other = np.asarray(forward(random_model(ONE_LAYER, layout(moe, "efd")), tokens)[0])
    # Sums of at most F = 48 float32 products in another order.
    np.testing.assert_allclose(other, plain, rtol=0, atol=2e-5 * np.abs(plain).max())


def test_files_do_not_depend_on_the_layout(tiny_config, tmp_path):
    for name in ("edf", "efd"):
        save_pretrained(Decoder(tiny_config, moe=MoeConfig(expert_layout=name), seed=3), tmp_path / name)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("edf", "efd"))
    assert first == second
    plain = load_pretrained(tmp_path / "edf", moe=MoeConfig(expert_layout="edf")).model
    other = dict(iter_params(load_pretrained(tmp_path / "edf", moe=MoeConfig(expert_layout="efd")).model))
    for path, param in iter_params(plain):
        mine, theirs = np.asarray(param[...]), np.asarray(other[path][...])
        if ".experts." in path:
            assert other[path].get_metadata("spec").axes == (
                "expert", *param.get_metadata("spec").axes[:0:-1],
            )  # fmt: skip
            theirs = theirs.swapaxes(1, 2)
        np.testing.assert_array_equal(mine, theirs, err_msg=path)


def test_weights_load_where_the_group_can_read_them(tiny_config, tmp_path):
    save_pretrained(Decoder(tiny_config, seed=0), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044 == 0o044
