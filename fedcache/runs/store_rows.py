"""The rows of one store, dealt to clients by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import unknown
from fedcache.extract.planning.plan import say_templates
from fedcache.federate.engine.client_overrides import ClientOverrides
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.partition.partition import Partition
from fedcache.runs.arrays import arrays_for, feat_post_for, images_for
from fedcache.runs.client_overrides import check_named, client_overrides, named_backbones
from fedcache.runs.encoders import encoders_of_run
from fedcache.runs.features import RunFeatures, read_images, read_store
from fedcache.runs.partitions import need_labels, partition_seeds, single_class_warning
from fedcache.runs.row_sources import Preparation
from fedcache.runs.store_choice import find_or_extract
from fedcache.store.store import Store


class StoreRows:
    """A ``RowSource``: the store of a configuration, extracted first where there is none.

    Args:
        config: names the store or its dataset, the backbones, and perhaps a saved partition.
        partition: how rows are dealt, when none is named.
        preparation: what preparing may do.

    Attributes:
        store: once it is open.
    """

    store: Store

    def __init__(self, config: TrainConfig, partition: PartitionConfig, preparation: Preparation) -> None:
        self.config, self.partition, self.preparation = config, partition, preparation
        self._trained_rows = np.empty(0, np.int64)

    def open(self, method: Method, settings: Mapping[str, Value]) -> float:
        """Find the store; the seconds of the extraction that was run for it."""
        p = self.preparation
        self.store, seconds = find_or_extract(
            method, self.config, p.home, extract=p.extract, observer=p.observer, stop=p.stop
        )
        check_named(self.config, self.store, p.home)
        return seconds

    def arrays(self, method: Method, settings: Mapping[str, Value]) -> list[str]:
        """Those of ``--backbones``, else what the method takes by itself."""
        names = named_backbones(self.config)
        keys = arrays_for(method, settings, self.store, names, self.preparation.observer)
        need_labels(method, self.store, None)
        if "image tower" in method.needs:
            images_for(self.store, keys[0])  # refused before rows are dealt
        for name in self.config.domain:
            if name not in self.store.samples.domains:
                raise unknown("domain", name, self.store.samples.domains)
        return keys

    def partitions(self, method: Method, seeds: Sequence[int]) -> tuple[dict[int, Partition], str | None]:
        """A saved one, or those of a scheme; what is wrong with the labels of its rows is refused or warned of."""
        p, config, samples = self.preparation, self.config, self.store.samples
        key = (self.store.path, method.defaults, config.partition, config.domain, str(self.partition), tuple(seeds),
               p.repartition)  # fmt: skip
        if key not in p.cache.partitions:
            p.cache.partitions[key] = partition_seeds(
                method, self.store, config, self.partition, seeds, repartition=p.repartition, observer=p.observer
            )
        found, name = p.cache.partitions[key]
        first = next(iter(found.values()))
        self._trained_rows = rows = np.concatenate([c.train for c in first.clients])
        need_labels(method, self.store, rows)
        warning = single_class_warning(method, samples.label[rows], samples.classes)
        if warning is not None and warning not in p.cache.warned:
            p.cache.warned.add(warning)
            p.observer.warn(warning)
        if (samples.label[first.test] < 0).all():
            p.observer.note("No test row has a label: the models are made, and nothing is scored.")
        return found, name

    def feat_post(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str]) -> str:
        """As asked, else what is usual for these backbones, which is said where features are read."""
        config, reads_images = self.config, "pixels" in method.reads(settings)
        observer = None if reads_images else self.preparation.observer
        return feat_post_for(settings, "feat_post" in config.set, config.preset, self.store, arrays, observer)

    def read(self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str) -> RunFeatures:
        """Features or images of every row of the store, with live encoders for a method that runs some."""
        p, store, reads = self.preparation, self.store, method.reads(settings)
        encoders = encoders_of_run(method, store, arrays[0], p.home)
        if encoders is not None and encoders.images is not None:
            arrays = [*arrays, encoders.images]
        if "pixels" in reads:
            features = read_images(store, arrays)
        else:
            features = self._read_once(method, settings, arrays, feat_post)
        if encoders is not None:
            features = encoders.add_to(features, store)
        say_templates(list(features.templates), p.observer)
        if not reads & {"labels", "text"} and (store.samples.label[self._trained_rows] < 0).all():
            p.observer.note("No training row has a label: no linear probe can be trained, and nothing is scored.")
        if "views" in reads and features.data.x.shape[1] < 3:
            p.observer.note(
                f"Views stored of each image: {features.data.x.shape[1]}. {method.name} wants augmentations: approx; "
                "fedcache extract --views 8 stores some."
            )
        return features

    def _read_once(
        self, method: Method, settings: Mapping[str, Value], arrays: Sequence[str], feat_post: str
    ) -> RunFeatures:
        """The features, from the cache when the last point of the grid had the same."""
        cache, rows = self.preparation.cache, self._trained_rows
        determines_scale = rows.tobytes() if feat_post == "standardize" else b""
        key = (self.store.path, tuple(arrays), feat_post, determines_scale, method.needs, settings.get("init"),
               settings.get("head"))  # fmt: skip
        if cache.features is None or cache.features[0] != key:
            cache.features = None  # the old ones go before the new ones come
            observer = self.preparation.observer
            cache.features = (key, read_store(method, settings, self.store, arrays, feat_post, rows, observer))
        return cache.features[1]

    def overrides(self, method: Method, features: RunFeatures, clients: int) -> dict[int, ClientOverrides]:
        """Those of ``--client-backbones`` and ``--client-set``."""
        widths = features.data.widths
        return client_overrides(method, self.config, self.store, features.arrays, widths, clients)

    def dataset(self) -> dict[str, Any]:
        """Slug, digest and numbers of rows."""
        d = self.store.dataset
        return {"slug": str(d["slug"]), "digest": str(d["digest"]), "rows": self.store.rows, "ok": self.store.rows_ok}

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Domains and classes."""
        return self.store.samples.domains, self.store.samples.classes

    def backbones(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Names of the backbones that made the arrays."""
        return tuple(str(self.store.arrays[key].recipe.get("backbone", key)) for key in arrays)
