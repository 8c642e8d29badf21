"""What "auto" becomes, with the reason; what was asked for is taken or refused, never replaced."""

import jax
import pytest

from moejax.core.errors import ConfigError, DeviceError
from moejax.core.resolve import Resolution, as_dict, resolve_dtype, resolve_platform


def test_platform() -> None:
    assert resolve_platform("auto") == Resolution("engine.platform", "cpu", "JAX's default backend")
    assert resolve_platform("cpu") == Resolution("engine.platform", "cpu", "asked for")


def test_a_platform_that_is_not_there() -> None:
    with pytest.raises(DeviceError) as caught:
        resolve_platform("gpu")
    assert str(caught.value) == (
        "engine.platform=gpu: JAX sees no such device, only cpu; "
        "install moejax[cuda12] or [cuda13] on a CUDA machine"
    )


def test_a_platform_that_is_there_but_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU on a GPU machine: JAX must be told before it starts."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(DeviceError) as caught:
        resolve_platform("cpu")
    assert str(caught.value) == (
        "engine.platform=cpu: JAX's default backend is gpu; set JAX_PLATFORMS=cpu before starting"
    )
    assert resolve_platform("auto").value == "gpu"


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_dtype_by_itself(stored: str) -> None:
    on_cpu = resolve_dtype("auto", stored, "cpu")
    assert on_cpu.value == "float32" and f"checkpoint is {stored}" in on_cpu.reason
    on_gpu = resolve_dtype("auto", stored, "gpu")
    assert on_gpu == ("model.dtype", stored, "as the checkpoint's configuration says")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_dtype_asked_for(platform: str) -> None:
    assert resolve_dtype("float16", "bfloat16", platform) == ("model.dtype", "float16", "asked for")
    with pytest.raises(ConfigError) as caught:
        resolve_dtype("bf16", "bfloat16", platform)
    assert str(caught.value) == (
        "model.dtype: unknown value 'bf16'; did you mean 'bfloat16'? "
        "(known: auto, bfloat16, float16, float32)"
    )


def test_resolutions_read_well_and_go_into_results() -> None:
    resolutions = [Resolution("a", "x", "because"), Resolution("b", "y", "asked for")]
    assert str(resolutions[0]) == "a = x (because)"
    assert as_dict(resolutions) == {
        "a": {"value": "x", "reason": "because"},
        "b": {"value": "y", "reason": "asked for"},
    }
