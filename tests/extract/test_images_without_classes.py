"""Images without labels, extracted with a backbone that also has a text tower."""

import numpy as np
from command import fedcache, ok
from PIL import Image

import fedcache as fc
from fedcache.errors import Exit

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 24, 24, 3), dtype=np.uint8)


def test_images_without_classes_have_features_and_it_is_said_that_they_have_no_text_features(
    own_home, tmp_path
):
    np.save(tmp_path / "im.npy", PIXELS)
    done = fedcache(f"extract --dataset arrays:{tmp_path / 'im.npy'} --backbones glyph-clip")
    assert done.code == Exit.OK
    assert "no text features" in done.err
    told = ok("inspect").data
    assert (told["ok"], told["classes"], told["text"]) == (6, [], [])
    refused = fedcache("train --method clip-zs --scheme iid --clients 2")
    assert refused.code == Exit.STORE
    assert "clip-zs needs text features" in refused.err


def test_images_of_a_program_without_labels_have_features(own_home):
    store = fc.extract([Image.fromarray(pixels) for pixels in PIXELS], "glyph-clip")
    assert (store.rows_ok, list(store.samples.classes), store.texts) == (6, [], {})
