"""Features as training reads them, from the definition of each ``feat_post``."""

import numpy as np


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


def prepared(features, post, train):
    """The definition, over whole arrays: ``prepare_features`` gives the same bits, however much it holds at a time."""
    out = [f.astype(np.float32) for f in features]
    if post in ("l2", "center"):
        out = [unit(f) for f in out]
    x = np.concatenate(out, axis=-1)
    if post == "l2_concat":
        x = unit(x)
    if post == "sign":
        x = np.where(np.isnan(x), np.nan, x > 0).astype(np.float32)
    if post == "standardize":
        known = x[np.unique(train), 0]
        scale = known.std(0, dtype=np.float64)
        scale[scale == 0] = 1
        x = ((x - known.mean(0, dtype=np.float64)) / scale).astype(np.float32)
    if post == "center":
        x = (x - x[np.unique(train), 0].mean(0, dtype=np.float64)).astype(np.float32)
        ends = np.cumsum([f.shape[-1] for f in features])[:-1]
        x = np.concatenate([unit(part) for part in np.split(x, ends, -1)], -1)
    return x
