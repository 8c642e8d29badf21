"""Post-training quantization of a model: calibration, folding, and the walk through its layers.

`apply.quantize_model` is the way in. The methods themselves are `moejax.quantization`; how quantized weights
are multiplied is `moejax.ops` and the modules that hold them.
"""
