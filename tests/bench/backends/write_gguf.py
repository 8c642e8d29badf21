"""MODEL_DIR FILE: a small Qwen3-MoE's safetensors as a float32 GGUF file. A program for the peers'
interpreter, which needs gguf, safetensors and numpy."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def main(directory: Path, path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    weights = {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}
    out = gguf.GGUFWriter(str(path), "qwen3moe")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_expert_feed_forward_length(config["moe_intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_expert_count(config["num_experts"])
    out.add_expert_used_count(config["num_experts_per_tok"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("none")

    def add(name: str, array: np.ndarray) -> None:
        out.add_tensor(f"{name}.weight", np.ascontiguousarray(array, np.float32))

    embedding = weights["model.embed_tokens.weight"]
    add("token_embd", embedding)
    add("output_norm", weights["model.norm.weight"])
    add("output", weights.get("lm_head.weight", embedding))
    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer}", f"blk.{layer}"
        for theirs, name in LAYER.items():
            add(f"{target}.{name}", weights[f"{source}.{theirs}.weight"])
        for theirs, name in EXPERTS.items():
            each = [
                weights[f"{source}.mlp.experts.{e}.{theirs}.weight"] for e in range(config["num_experts"])
            ]
            add(f"{target}.{name}", np.stack(each))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
