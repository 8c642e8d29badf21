"""Hydra composes the same few files hundreds of times in a run of the tests: what it makes of them is kept.

Only of the repository's `configs/`, of Hydra's own and of schemas. What is handed out is a copy, so nothing
can change what is kept; overrides of values, sweeps and errors are Hydra's each time. It imports no JAX:
`conftest` has to set its environment first.
"""

import copy
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

OURS = ("", str(Path(__file__).parent.parent / "configs"), "hydra.conf")


class Kept(ConfigResult):
    """A file's config, copied when somebody reads it."""

    def __init__(self, result: ConfigResult) -> None:
        self.__dict__.update(result.__dict__)
        self._kept = self.__dict__.pop("config")

    def __getattr__(self, name: str) -> Any:
        if name != "config":
            raise AttributeError(name)
        self.config = copy.deepcopy(self._kept)
        return self.config


def keep_compositions() -> None:
    """Patches Hydra for the rest of the process."""
    load, store_node = ConfigRepository.load_config, ConfigStore.store
    compose = ConfigLoaderImpl._compose_config_from_defaults_list
    make_choices = defaults_list._create_interpolation_map
    files, composed, stored = dict[Any, ConfigResult](), dict[Any, Any](), dict[Any, Any]()

    def store_once(store: ConfigStore, name: str, node: Any, **place: Any) -> None:
        """A schema that is there already is not made into nodes again; another makes all compositions new."""
        key = name, *place.items()
        if stored.get(key) is not node:
            store_node(store, name, node, **place)
            stored[key] = node
            files.clear()
            composed.clear()

    def load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
        source = repository._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        if source is None or source.path not in OURS:
            return load(repository, config_path)
        key = source.scheme(), source.path, source.provider, config_path
        if key not in files:
            files[key] = load(repository, config_path)
        kept = Kept(files[key])
        kept.defaults_list = copy.deepcopy(kept.defaults_list)
        return kept

    def compose_once(loader: ConfigLoaderImpl, defaults: Any, repo: Any) -> Any:
        if any(source.path not in OURS for source in repo.get_sources()):
            return compose(loader, defaults, repo)
        fields = [(d.config_path, d.parent, d.package, d.is_self, d.primary) for d in defaults]
        key = (*fields, *((source.scheme(), source.path) for source in repo.get_sources()))
        if key not in composed:
            composed[key] = compose(loader, defaults, repo)
        return copy.deepcopy(composed[key])

    def choices_if_asked(overrides: Any, defaults: Any, self_added: bool) -> Any:
        """What interpolations in a list of defaults may name, which few lists have."""
        asked = any(not each.is_self() and each.is_interpolation() for each in defaults)
        return make_choices(overrides, defaults, self_added) if asked else None

    # What it hands out of the store it copies again.
    ConfigStore.__deepcopy__ = lambda store, memo: store
    ConfigStore.store = store_once
    ConfigRepository.load_config = load_once
    ConfigLoaderImpl._compose_config_from_defaults_list = compose_once
    defaults_list._create_interpolation_map = choices_if_asked
