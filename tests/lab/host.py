"""What fetching asks of a host, for tests without an Environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.store import Store


@dataclass(frozen=True)
class Host:
    """The FetchSettings of a store; pip's default index is a folder that does not exist."""

    store: Store
    pip: PipConfig = field(default_factory=PipConfig)
    site: Site = field(default_factory=Site)
    variables: Mapping[str, str] = field(default_factory=dict)
    index: str = "file:///nonexistent"

    def default_index(self) -> str:
        return self.index
