"""The configuration's `backend` section, which names the engines that an experiment measures. No JAX here."""

import importlib.util
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from moejax.core.checked import Checked, NonNegativeInt, PositiveInt, PositiveNumber
from moejax.core.errors import ConfigError, unknown
from moejax.core.parallel import ParallelConfig

Kind = Literal["moejax", "hf_transformers", "llama_cpp", "openai_endpoint", "moejax_server"]
Prompts = Literal["token_ids", "text"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Package that each needs in its interpreter, and the extra that brings it.
_NEEDS = {
    "hf_transformers": ("transformers", "hf"), "llama_cpp": ("llama_cpp", "llama_cpp"),
    "openai_endpoint": ("openai", "openai"), "moejax_server": ("uvicorn", "serve"),
}  # fmt: skip
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOCAL = ("hf_transformers", "llama_cpp")
# Fields that only some kinds have.
_ONLY: dict[str, tuple[str, ...]] = {
    "python": _LOCAL, "path": _LOCAL, "threads": _LOCAL, "device": _LOCAL, "dtype": ("hf_transformers",),
    "url": ("openai_endpoint",), "model": ("openai_endpoint",), "api_key_env": ("openai_endpoint",),
    "prompts": ("openai_endpoint", "moejax_server"), "options": (*_LOCAL, "openai_endpoint", "moejax_server"),
    "adapters": ("moejax",), "merged": ("moejax",), "reconfigure_after": ("moejax",),
    "reconfigure_to": ("moejax",), "disaggregate": ("moejax",), "disaggregate_to": ("moejax",),
    "stream_interval": ("moejax_server",),
}  # fmt: skip
# What a backend beside the first takes from the section itself where it has none of its own.
_SHARED = ("python", "threads")


@dataclass(frozen=True)
class BackendOptions(Checked, section="backend"):
    """One engine.

    Attributes:
        kind: `moejax`; `hf_transformers` and `llama_cpp`, in a process of their own; `openai_endpoint`, a
            server that speaks OpenAI's completions; `moejax_server`, such a one of our own, which is started.
        python: interpreter that has the peer's packages; None: this one.
        path: its weights. hf_transformers: a Hugging Face directory, None for the model's own. llama_cpp: a
            GGUF file.
        threads: of the peer on the CPU; None: one for each core that this process may use.
        device: `auto` takes the GPU where the peer's packages can.
        dtype: hf_transformers: `auto` is float32 on the CPU and the checkpoint's own elsewhere.
        options: hf_transformers: further arguments of `from_pretrained`; llama_cpp: fields of
            `llama_context_params`; both: `prompt_lookup_num_tokens`, with which they draft as many; servers:
            further fields of the request's body.
        url: openai_endpoint: its base, such as http://localhost:8000/v1.
        model: openai_endpoint: the model's name there; None where it serves only one.
        api_key_env: openai_endpoint: the environment variable that holds the key; None: without a key.
        prompts: servers: what is sent; `text` needs the model's tokenizer.
        stream_interval: moejax_server: steps whose tokens one chunk carries (`serve.stream_interval`).
        timeout_s: longest silence, in seconds, after which a peer counts as hung.
        adapters: moejax: how many random LoRA adapters (of `engine.adapters.rank` and `targets`) requests
            have in turns, or directories in PEFT's format.
        merged: moejax: adapters are merged, each into a copy of the model, and one's requests run after
            another's, instead of together in `engine.adapters.slots`.
        reconfigure_after, reconfigure_to: moejax: after so many requests that arrive over time the engine
            takes another layout while it serves (`LLM.reconfigure`); 0: never.
        disaggregate, disaggregate_to: moejax: prompts are computed by another engine of that layout, on
            `devices` of this process or in a `process` of its own (`moejax.engine.disaggregated`).
    """

    kind: Kind = "moejax"
    python: str | None = None
    path: str | None = None
    threads: PositiveInt | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    prompts: Prompts = "token_ids"
    stream_interval: PositiveInt = 1
    timeout_s: PositiveNumber = 600.0
    adapters: NonNegativeInt | list[str] = 0
    merged: bool = False
    reconfigure_after: NonNegativeInt = 0
    reconfigure_to: ParallelConfig = field(default_factory=ParallelConfig)
    disaggregate: Literal["none", "devices", "process"] = "none"
    disaggregate_to: ParallelConfig = field(default_factory=ParallelConfig)

    def check(self, where: str = "backend", shared: Collection[str] = ()) -> None:
        """Checks what can be known before anything runs: values that belong to another kind, missing files,
        packages, interpreters.

        Args:
            where: the section's name in messages.
            shared: fields that stand here for other backends.

        Raises:
            ConfigError: the first that is wrong.
        """
        usual = BackendOptions()
        for name, kinds in _ONLY.items():
            foreign = self.kind not in kinds and name not in shared
            if foreign and getattr(self, name) != getattr(usual, name):
                raise ConfigError(f"{where}.{name} is for {' and '.join(kinds)}, and this is {self.kind}")
        if self.merged and not self.adapters:
            raise ConfigError(f"{where}.merged=true needs {where}.adapters: how many, or their directories")
        if self.disaggregate != "none" and (self.merged or self.adapters or self.reconfigure_after):
            others = "adapters, merged and reconfigure_after"
            raise ConfigError(f"{where}.disaggregate={self.disaggregate} does not go with {others}")
        if self.kind in _LOCAL:
            self._check_worker(where)
        if self.kind == "moejax_server":
            _check_packages(self.kind, "openai_endpoint")
        if self.kind == "openai_endpoint":
            self._check_endpoint(where)

    def _check_worker(self, where: str) -> None:
        if self.python is not None and shutil.which(self.python) is None:
            raise ConfigError(f"{where}.python: there is no program {self.python!r}")
        if self.python is None and importlib.util.find_spec(_NEEDS[self.kind][0]) is None:
            raise ConfigError(missing_package(self.kind, where))
        if self.kind == "llama_cpp":
            if self.path is None:
                raise ConfigError(f"{where}.path is missing: llama.cpp reads a GGUF file; {_MAKE_GGUF}")
            if not Path(self.path).is_file():
                raise ConfigError(f"{where}.path: there is no file {self.path!r}; {_MAKE_GGUF}")
        elif self.path is not None and not (Path(self.path) / "config.json").is_file():
            raise ConfigError(f"{where}.path: {self.path!r} is no Hugging Face directory (no config.json)")

    def _check_endpoint(self, where: str) -> None:
        _check_packages(self.kind)
        if self.url is None:
            raise ConfigError(f"{where}.url is missing: the server's base, such as http://localhost:8000/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"{where}.url must be http://HOST:PORT/v1 or https://…, got {self.url!r}")
        # What stands in a configuration is recorded with every result.
        if parts.username is not None or parts.password is not None or parts.query:
            raise ConfigError(
                f"{where}.url must hold no name, password or query, since results keep it; export the key and"
                f" give its variable's name as {where}.api_key_env"
            )
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            raise ConfigError(
                f"{where}.api_key_env must be the name of an environment variable, such as OPENAI_API_KEY,"
                " and never the key itself"
            )


@dataclass(frozen=True)
class BackendSection(BackendOptions):
    """The backend that is measured, and further ones beside it.

    Attributes:
        compare_with: names of `peers` that get the same requests, in turns with the first.
        peers: their options by name, an entry for each kind and whatever is added; `python` and `threads`
            that an entry leaves out are those of the section itself.
    """

    compare_with: tuple[str, ...] = ()
    peers: dict[str, BackendOptions] = field(
        default_factory=lambda: {kind: BackendOptions(kind=kind) for kind in get_args(Kind)}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.compare_with:
            if name not in self.peers:
                raise ConfigError(f"backend.compare_with: {unknown('backend', name, self.peers)}")
        names = [name for name, _ in self.chosen()]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"backend.compare_with: {name} is measured already; every name once")
        # Options that everyone shares may stand beside a first backend that has none of them.
        used = {self.peers[name].kind for name in self.compare_with}
        self.check(shared={name for name in _SHARED if used & set(_ONLY[name])})
        for name, options in self.chosen()[1:]:
            options.check(f"backend.peers.{name}")

    def check_run(self, load_format: str, ours_only: Mapping[str, bool]) -> None:
        """Checks that the rest of the configuration asks nothing of peers that they lack.

        Args:
            load_format: of the model.
            ours_only: key → whether it is set; what only our engine has.

        Raises:
            ConfigError: random weights, which no peer can read; or a key of ours without our engine.
        """
        chosen = self.chosen()
        readers = [name for name, options in chosen if options.kind in _LOCAL]
        if readers and load_format == "dummy":
            raise ConfigError(
                f"backend {readers[0]} reads weights, and model.load_format=dummy makes random ones that only"
                " moejax has: model=checkpoint model.path=DIR"
            )
        keys = [key for key, is_set in ours_only.items() if is_set]
        if keys and not any(options.kind == "moejax" for _, options in chosen):
            raise ConfigError(f"{keys[0]} is moejax's own, and {self.kind} knows nothing of it; leave it out")

    def chosen(self) -> list[tuple[str, BackendOptions]]:
        """Returns (name, options) of all that are measured, the first one first."""
        chosen: list[tuple[str, BackendOptions]] = [(self.kind, self)]
        for name in self.compare_with:
            options = self.peers[name]
            if options.kind in _LOCAL:
                missing = [key for key in _SHARED if getattr(options, key) is None]
                options = replace(options, **{key: getattr(self, key) for key in missing})
            chosen.append((name, options))
        return chosen


def _check_packages(*kinds: str) -> None:
    for package, extra in (*(_NEEDS[kind] for kind in kinds), ("aiohttp", "openai")):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{kinds[0]} needs the package {package}: pip install 'moejax[{extra}]'")


_MAKE_GGUF = (
    "llama.cpp's convert_hf_to_gguf.py makes one: python convert_hf_to_gguf.py MODEL_DIR --outtype f32"
    " --outfile model.gguf"
)


def missing_package(kind: str, where: str, module: str | None = None) -> str:
    """Returns the line for a package that the interpreter of a peer lacks: `module`'s, or the peer's own."""
    package, extra = _NEEDS[kind]
    if module is not None and not module.startswith(package):
        package = module
    return (
        f"{kind} needs the package {package}, which this Python does not have: pip install 'moejax[{extra}]',"
        f" or {where}.python=PYTHON of an environment that has it"
    )
