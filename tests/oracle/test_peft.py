"""Adapters that PEFT has made, merged into our model, against PEFT's own logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax.checkpoint.hf import load_pretrained
from moejax.checkpoint.peft import merge_adapter, read_adapter
from tests.oracle.conftest import Pair

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

ATTENTION = r".*self_attn\.(q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)"
DENSE = r"|.*(mlp|shared_experts?)\.(gate_proj|up_proj|down_proj)|.*shared_expert_gate"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "qwen3_moe-plain": ["mlp.gate.weight", *EXPERTS],
    "qwen2_moe-dense-layer": ["experts.down_proj"],
    "mixtral-plain": ["mlp.gate.weight", *EXPERTS],
    "deepseek_v3-groups": EXPERTS,
    "gpt_oss-narrow-window-two": ["router.weight", *EXPERTS],
    "granitemoe-factors": ["input_linear.weight"],
}


@pytest.mark.parametrize("name", CASES)
def test_merged_logits_are_pefts(pair: Callable[[str], Pair], tmp_path: Path, name: str) -> None:
    import peft
    import torch

    made = pair(name)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=ATTENTION + DENSE,
        target_parameters=CASES[name],
        init_lora_weights=False,
        use_rslora=name.startswith("qwen3"),
        alpha_pattern={"v_proj": 7},
    )
    theirs: Any = peft.get_peft_model(made.theirs, config)
    tokens = torch.randint(0, 90, (2, 12))
    try:
        theirs.save_pretrained(tmp_path)
        with torch.no_grad():
            expected = theirs(tokens).logits.numpy()
    finally:
        theirs.unload()
    with torch.no_grad():
        base = made.theirs(tokens).logits.numpy()
    ours, model_config = load_pretrained(made.directory, dtype="float32")
    merge_adapter(ours, read_adapter(tmp_path, model_config))
    logits = np.asarray(ours(tokens.numpy()))
    assert np.abs(expected - base).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=2e-3, atol=2e-4 * np.abs(expected).max())
