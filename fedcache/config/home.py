"""Where things live: ``$FEDCACHE_HOME``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """``$FEDCACHE_HOME``: stores and results, which are data and not a cache that may vanish."""

    root: Path
    offline: bool = False

    @classmethod
    def from_environment(cls) -> Home:
        """``FEDCACHE_HOME``, else the XDG data directory; ``FEDCACHE_OFFLINE`` forbids downloads."""
        offline = os.environ.get("FEDCACHE_OFFLINE", "") not in ("", "0")
        root = os.environ.get("FEDCACHE_HOME")
        if root:
            return cls(Path(root).expanduser(), offline)
        from platformdirs import user_data_path

        return cls(user_data_path("fedcache"), offline)

    @property
    def stores(self) -> Path:
        """Feature stores."""
        return self.root / "stores"

    def store(self, slug: str, digest: str) -> Path:
        """``stores/<slug>-<8 hex of the content digest>.zarr``."""
        return self.stores / f"{slug}-{digest[:8]}.zarr"

    @property
    def runs(self) -> Path:
        """Results."""
        return self.root / "runs"

    @property
    def data(self) -> Path:
        """Datasets found by name."""
        return self.root / "data"

    @property
    def digests(self) -> Path:
        """Remembered digests of files."""
        return self.root / "digests"

    @property
    def last(self) -> Path:
        """Which store was extracted last."""
        return self.root / "last.json"
