"""How many parameters stay fixed: those of the network that computes a backbone's image features.

Without the classifier that was cut off and without a text tower. Numbers, so that nothing is loaded to look one up.
"""

from __future__ import annotations

RESNET18 = 11_171_904
"""With the Meta-Dataset stem (5x5) and no classifier."""

PARAMETERS = {
    "efficientnet-lite0": 3_371_008,
    "efficientnet-lite1": 4_135_680,
    "efficientnet-lite2": 4_811_072,
    "glyph-clip": 1_360_664,
    "clip-rn50": 38_316_896,
    "clip-vit-b-16": 86_192_640,
    "clip-vit-b-32": 87_849_216,
    **{f"resnet18-{domain}{p}": RESNET18 for domain in ("quickdraw", "aircraft", "birds") for p in ("", "-maxpool")},
    "vit-tiny": 5_524_416,
    "vit-tiny-in21k": 5_524_416,
    "vit-small": 21_665_664,
    "vit-base": 85_798_656,
    "alexnet": 2_469_696,
    "vgg11": 9_220_480,
    "cnn2": 6_930_088,
    "pixels": 0,
}
