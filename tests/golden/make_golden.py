"""Writes the golden files: tiny checkpoints as transformers saves them, with its logits and greedy tokens.

    python -m tests.golden.make_golden            (from the repository root, with the `oracle` extra)

`tests/models/test_golden.py` checks them without torch. Make them anew only when a case changes or a new
transformers version answers differently, and say which in the commit.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import transformers

from tests.oracle import hf
from tests.oracle.cases import GOLDEN, by_name

HERE = Path(__file__).resolve().parent
BATCH, LENGTH, STEPS = 2, 20, 32
# One of them in shards, so that reading an index that transformers wrote is covered, too.
SHARDED = "qwen3_moe-dense-layers-bias-tied"


def make(name: str) -> None:
    case, directory = by_name(name), HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    options = {"max_shard_size": "6KB"} if name == SHARDED else {}
    hf.save(hf.build(case, "golden", seed=100), directory, case.dtype, **options)
    (directory / "generation_config.json").unlink(missing_ok=True)
    model = hf.load(directory)
    tokens = hf.random_tokens(model.config.vocab_size, BATCH, LENGTH)
    np.savez_compressed(
        directory / "golden.npz",
        tokens=tokens,
        logits=hf.logits(model, tokens),
        greedy=hf.greedy(model, tokens, STEPS),
    )
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{name}: {size / 1000:.0f} kB, {len(list(directory.glob('*.safetensors')))} weight file(s)")


def main() -> None:
    for old in HERE.iterdir():
        if old.is_dir() and old.name not in GOLDEN and (old / "golden.npz").exists():
            shutil.rmtree(old)
    for name in GOLDEN:
        make(name)
    about = {"transformers": transformers.__version__, "torch": hf.torch.__version__.partition("+")[0]}
    (HERE / "made_with.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
