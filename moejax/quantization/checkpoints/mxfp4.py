"""gpt-oss's checkpoints (`quant_method` "mxfp4"): the experts' matrices, stacked; the rest is in floats.

    gate_up_proj_blocks  uint8 [E, 2 F, D / 32, 16], two codes a byte, the low nibble first; rows 2 f gates
    gate_up_proj_scales  uint8 [E, 2 F, D / 32], exponents of powers of two
    down_proj_blocks, down_proj_scales  [E, D, F / 32, 16] and [E, D, F / 32]

value = code · scale (OCP Microscaling Formats v1.0; arXiv 2508.10925).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moejax.quantization.arithmetic import unpack
from moejax.quantization.checkpoints.convention import Convention, QuantFields, Role, Verdict
from moejax.quantization.checkpoints.layouts import Fp4Scheme
from moejax.quantization.checkpoints.scheme import Arrays, Complain, Index, Need, Shape, our_codes
from moejax.quantization.formats import MXFP4

STACKED = {
    "gate_up": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down": {"down_proj": slice(None)},
}
"""The rows of each stack that an expert's matrix has."""


@dataclass(frozen=True)
class BlocksScheme(Fp4Scheme):
    main, scale = "blocks", "scales"

    def needs(self, D: int, F: int) -> dict[str, Need]:
        groups = D // self.format.group
        return {
            self.main: Need(((F, groups, self.format.group // 2),), ("U8",)),
            self.scale: Need(((F, groups),), self.scale_dtypes()),
        }

    def read(self, tensors: Mapping[str, np.ndarray], D: int, F: int, complain: Complain) -> Arrays:
        codes = unpack(tensors[self.main].reshape(F, D // 2), 2)
        return {"values": our_codes(codes, self.format), **self.read_scales(tensors, D, F, complain)}


@dataclass(frozen=True)
class Mxfp4(Convention):
    scheme: BlocksScheme

    def verdict(self, module: str, role: Role) -> Verdict:
        return Verdict(self.scheme if ".experts." in module else None, must=False)

    def parts(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[str, Index]]:
        parts: dict[str, tuple[str, Index]] = {}
        for key, shape in shapes.items():
            module, _, last = key.rpartition(".")
            stack, _, kind = last.rpartition("_proj_")
            if kind in (self.scheme.main, self.scheme.scale) and stack in STACKED and len(shape) > 1:
                for e, (name, rows) in itertools.product(range(shape[0]), STACKED[stack].items()):
                    parts[f"{module}.{e}.{name}.{kind}"] = key, (e, rows)
        return parts


def parse_mxfp4(fields: QuantFields) -> Mxfp4:
    """Which modules are not converted the tensors say."""
    return Mxfp4("mxfp4", BlocksScheme(MXFP4))
