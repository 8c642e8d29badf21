"""What whoever runs a server may do to its engine while it answers."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax

from moejax.core.errors import RequestError, unknown
from moejax.engine.core import PauseMode
from moejax.engine.llm import LLM
from moejax.tracking.repository import check_files


def administer(llm: LLM, action: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Does what `ACTIONS` names with these arguments, which may take long; returns what there is to tell.

    Raises:
        RequestError: arguments that are missing, unknown or no text; those ending in "?" may be missing.
        MoejaxError: what the engine raises.
    """
    act, wanted = ACTIONS[action]
    names = [name.rstrip("?") for name in wanted]
    for name in given.keys() - {*names}:
        raise RequestError(unknown("argument", name[:100], names) if names else f"{action} takes none")
    for name in names:
        if f"{name}?" in wanted and name not in given:
            continue
        if not isinstance(given.get(name), str) or not given[name]:
            raise RequestError(f"{action}: {name} must be a text that is not empty")
    return {"done": action, **(act(llm, **given) or {})}


def _reload(llm: LLM, path: str, running: str = "wait") -> None:
    """Puts a checkpoint's values in place of the weights; `running` as for `LLM.update_weights`."""
    from moejax.checkpoint.hf import load_pretrained

    check_files(path)
    llm.update_weights(load_pretrained(path, dtype=llm.config.dtype).model, cast("PauseMode", running))


def _rebalance(llm: LLM) -> dict[str, Any]:
    done = llm.rebalance()
    return {"applied": done.applied, "seconds": done.seconds}


def _profile_start(llm: LLM, path: str) -> None:
    try:
        jax.profiler.start_trace(path)
    except (RuntimeError, OSError) as error:
        raise RequestError(f"profile_start: {error}") from None


def _profile_stop(llm: LLM) -> None:
    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        raise RequestError(f"profile_stop: {error}") from None


ACTIONS: dict[str, tuple[Callable[..., dict[str, Any] | None], tuple[str, ...]]] = {
    "load_adapter": (lambda llm, name, path: llm.load_adapter(name, path), ("name", "path")),
    "unload_adapter": (lambda llm, name: llm.unload_adapter(name), ("name",)),
    "reload": (_reload, ("path", "running?")),
    "rebalance": (_rebalance, ()),
    "pause": (lambda llm: llm.pause("keep"), ()),
    "unpause": (lambda llm: llm.unpause(), ()),
    "profile_start": (_profile_start, ("path",)),
    "profile_stop": (_profile_stop, ()),
}
"""By name what is done and the arguments it takes."""
