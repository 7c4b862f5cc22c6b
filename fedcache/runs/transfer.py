"""Cross-dataset transfer: train on one dataset, and score other datasets by the texts of their classes.

Zhou et al., "Conditional prompt learning for vision-language models" (CoCoOp), CVPR 2022, section 4.2. The trained
tensors get the texts of all classes of the other dataset. The accuracy is that on its test rows, among its classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedcache.config import Home
from fedcache.errors import StoreError, UsageError
from fedcache.extract.backbones.backbone import prompts
from fedcache.extract.planning.find_store import more_features, need_store
from fedcache.federate.engine.hyperparameters import Value
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.models.predictor import Predictor, keys_of_inputs
from fedcache.models.saved_model import ModelFacts, SavedModel, owned, scaling_tensors
from fedcache.runs.base_to_new import deployed_to, rows_to_test
from fedcache.runs.features import NewClasses, RunFeatures, Target, text_of
from fedcache.runs.origin import check_text
from fedcache.store.files import digest_of, sha256_hex


def open_targets(
    names: Sequence[str],
    method: Method,
    settings: Mapping[str, Value],
    features: RunFeatures,
) -> tuple[Target, ...]:
    """The datasets of ``--transfer``, in the order of their names.

    Raises UsageError for ingested features and for a dataset that is given twice; StoreError for a store without the
    features or class texts that the run reads, or without labelled test rows.

    Args:
        names: of stores.
        method: of the run.
        settings: of the method.
        features: of the run.
    """
    if names and any("size" not in recipe for recipe in features.recipes):
        raise UsageError(
            "--transfer needs features that fedcache has extracted. Nothing says whether embeddings of two files come "
            "from the same model.",
            "Leave --transfer out.",
        )
    targets: dict[str, Target] = {}
    for place in names:
        store = need_store(Home.from_environment(), path=place)
        slug = store.dataset["slug"]
        digest = store.dataset["digest"][:8]
        name = f"{slug}-{digest}"
        if name in targets:
            raise UsageError(
                f"--transfer has the dataset {name} twice.", "Remove one of the stores."
            )
        inputs = zip(features.arrays, features.recipes, strict=True)
        keys = keys_of_inputs(tuple(inputs), store)
        check_text(store, keys[0])
        text, _ = text_of(method, settings, store, keys)
        if text is None and features.data.text is not None:
            backbone = str(store.arrays[keys[0]].recipe.get("backbone"))
            raise StoreError(
                f"{store.path.name} has no class texts of {backbone}.",
                more_features(store, backbone),
            )
        class_text = None
        if text is not None:
            class_text = torch.from_numpy(text)
        classes = store.samples.classes
        in_prompts: tuple[str, ...] = ()
        if features.data.names:
            in_prompts = tuple(prompts(classes, "{}"))
        rows = rows_to_test(store.samples, 0, ())
        if not len(rows):
            raise StoreError(
                f"{store.path.name} has no labelled test rows.", "Give a store with labels."
            )
        label = store.samples.label[rows].astype(np.int64)
        new = NewClasses(label, rows, len(classes), class_text, in_prompts)
        targets[name] = Target(name, store, new)
    return tuple(targets[name] for name in sorted(targets))


def digests_of_targets(targets: Sequence[Target]) -> tuple[str, ...]:
    """A digest of each dataset and of its class texts. The recipes of its features are those of the run."""
    digests = []
    for _, store, new in targets:
        parts = ["transfer", store.dataset["digest"]]
        if new.text is not None:
            parts.append(sha256_hex(new.text.numpy().tobytes()))
        digests.append(digest_of(parts))
    return tuple(digests)


def transfer(
    out: TrainingOutput, facts: ModelFacts, features: RunFeatures, targets: Sequence[Target]
) -> dict[str, float]:
    """Name of a target -> the accuracy of the trained model on its test rows, a fraction.

    Args:
        out: of the run, with one global model.
        facts: of its model.
        features: of the run.
        targets: the other datasets.
    """
    accuracy = {}
    for name, store, new in targets:
        model = deployed_to(out, new)
        tensors = {f"server/{name}": t for name, t in model.down.items()}
        if new.text is not None:
            tensors["features/text"] = new.text
        # Live encoders made the class features, which are in the tensors; they read no image.
        of_target = replace(facts, classes=store.samples.classes, names=new.names, encoder=None)
        saved = SavedModel(of_target, owned(tensors | scaling_tensors(features.scaling)))
        device = str(features.data.x.device)
        towers = features.data.towers
        predictor = Predictor((saved,), device=device, method=model.method, encoders=towers)
        label = store.samples.label
        right = 0
        for rows, scores in predictor.over_store(store, new.rows):
            right += int((scores[0].argmax(-1) == label[rows]).sum())
        accuracy[name] = right / len(new.rows)
    return accuracy
