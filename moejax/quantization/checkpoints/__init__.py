"""Quantized weights as checkpoints store them: GPTQ, AWQ, compressed-tensors, fp8, mxfp4, and our own layout.

    convention.py           what a `quantization_config` says of each linear layer
    scheme.py               how one matrix's tensors look, and what of ours they become
    parse.py                `quantization_config` → convention
    gptq.py awq.py fp8.py mxfp4.py own.py
    compressed_tensors.py   its configuration; layouts.py, its tensors; compressed_config.py writes one

Everything here is numpy on one matrix at a time. It knows no files and no model; `moejax.checkpoint` does.
"""
