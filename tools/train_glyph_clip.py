"""Train glyph-CLIP, the backbone that ships with fedcache, from fonts; minutes on one CPU core.

    sudo apt-get install $(python tools/train_glyph_clip.py --packages)
    python tools/train_glyph_clip.py --out fedcache/extract/backbones

Every image is a character drawn from a font of the Debian packages below and then distorted; no photograph, scan or
data set is read. Fonts of the families that draw the test domain ``synth`` (those in matplotlib) are refused.

Each step draws 256 images and writes one caption for each of the 62 characters, and minimises

    CE(image -> captions) + 0.2 MP(caption -> images) + anneal * [CE(image -> anchors) + CE(captions -> anchors)] / 2

with cosine logits. CE is cross-entropy over the characters, leaving out those that look the same (0, O and o; C and
c); MP is the mean over captions of -log of the share of the caption's own images in a softmax over the batch. The
anchors are one free vector per character: while the text tower cannot yet tell captions apart it gives the image
tower nothing to learn from, and anchors give both something in the first hundred steps. They are thrown away.

The same seed, fonts, machine type, thread count and versions of torch, Pillow and FreeType give the same file to the
bit.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from glyph_drawing import CHARACTERS, Artist, ForbiddenFontError, Glyphs, render
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from fedcache.extract.backbones.glyph_clip import BACKBONE, build, tokenize

# The licence of the fonts, from /usr/share/doc/PACKAGE/copyright on Debian 12.
PACKAGES = {
    "fonts-averia-sans-gwf": "OFL-1.1",
    "fonts-averia-serif-gwf": "OFL-1.1",
    "fonts-bajaderka": "OFL-1.1",
    "fonts-breip": "OFL-1.0",
    "fonts-bwht": "OFL-1.1",
    "fonts-cabin": "OFL-1.1",
    "fonts-comfortaa": "OFL-1.1",
    "fonts-comic-neue": "OFL-1.1",
    "fonts-croscore": "OFL-1.1",
    "fonts-dancingscript": "OFL-1.1",
    "fonts-dkg-handwriting": "OFL-1.1",
    "fonts-dosis": "OFL-1.1",
    "fonts-dustin": "GPL-2",
    "fonts-ecolier-court": "OFL-1.1",
    "fonts-essays1743": "OFL-1.1 or LGPL-2.1",
    "fonts-femkeklaver": "CC-BY-SA-3.0",
    "fonts-georgewilliams": "OFL-1.1 or BSD-3-Clause",
    "fonts-humor-sans": "OFL-1.1",
    "fonts-kaushanscript": "OFL-1.1",
    "fonts-kiloji": "BSD-3-Clause",
    "fonts-kristi": "OFL-1.1",
    "fonts-lato": "OFL-1.1",
    "fonts-levien-typoscript": "OFL-1.0",
    "fonts-lobstertwo": "OFL-1.1",
    "fonts-ocr-b": "public domain (parts: any use)",
    "fonts-osifont": "GPL-3 with font exception or LGPL-3 with font exception",
    "fonts-paratype": "ParaType Free Font License",
    "fonts-play": "OFL-1.1",
    "fonts-quicksand": "OFL-1.1",
    "fonts-roadgeek": "MIT",
    "fonts-roboto-slab": "Apache-2.0",
    "fonts-routed-gothic": "OFL-1.1",
    "fonts-rufscript": "GPL-3 with font exception",
    "fonts-seto": "OFL-1.1",
    "fonts-sil-andika": "OFL-1.1",
    "fonts-sjfonts": "GPL-2 with font exception",
    "fonts-smc-chilanka": "OFL-1.1",
    "fonts-texgyre": "GUST Font License (LPPL)",
    "fonts-tlwg-purisa-ttf": "GPL-2 with font exception",
    "fonts-tomsontalks": "OFL-1.1",
    "fonts-tuffy": "public domain",
    "fonts-urw-base35": "AGPL-3 with font exception",
    "fonts-yanone-kaffeesatz": "OFL-1.1",
    "fonts-yusei-magic": "OFL-1.1",
}

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ANY = (
    "{}",
    "a photo of a {}.",
    "a photo of the {}.",
    "an image of {}.",
    "a picture of a {}.",
    "the character {}.",
    "a handwritten {}.",
    "a printed {}.",
    'a photo of the character "{}".',
)
NUMBER = (
    "a photo of the number {}.",
    'a photo of the number: "{}".',
    "the digit {}.",
    "a photo of the digit {}.",
    "a handwritten digit {}.",
    "the number {}.",
)
LETTER = ("a photo of the letter {}.", "the letter {}.", 'a photo of the letter: "{}".')
ALIKE = ["0Oo", "1lIi", "2Zz", "5Ss", "6bG", "8B", "9gq", *(c + c.upper() for c in "cfjkmptuvwxy")]
HELD_OUT = 10  # every tenth family draws no training image; templates are compared on it


def font_files(packages: list[str]) -> list[Path]:
    """The TrueType and OpenType files of installed Debian packages."""
    found = []
    for package in packages:
        listing = subprocess.run(
            ["dpkg", "-L", package], capture_output=True, text=True, check=False
        )
        if listing.returncode:
            sys.exit(
                f"The package {package} is not installed.\napt-get install {' '.join(packages)}"
            )
        found += [
            Path(line)
            for line in listing.stdout.splitlines()
            if line.lower().endswith((".ttf", ".otf"))
        ]
    return found


def alike() -> Tensor:
    """bool [62, 62]: pairs of different characters that a drawing need not tell apart."""
    pairs = torch.zeros(len(CHARACTERS), len(CHARACTERS), dtype=torch.bool)
    for group in ALIKE:
        members = [CHARACTERS.index(c) for c in group]
        pairs[torch.tensor(members)[:, None], torch.tensor(members)] = True
    return pairs.fill_diagonal_(False)


def captions(draw: random.Random) -> list[str]:
    """One caption per character; three in ten name a digit by its word."""
    lines = []
    for index, character in enumerate(CHARACTERS):
        if index < 10:
            word = draw.choice([WORDS[index], WORDS[index].capitalize()])
            name = word if draw.random() < 0.3 else character
            lines.append(draw.choice(ANY + NUMBER + NUMBER).format(name))
        else:
            lines.append(draw.choice(ANY + LETTER).format(character))
    return lines


def encode_text(model: nn.Module, tokens: Tensor) -> Tensor:
    """``model.encode_text`` without the zeros after the longest prompt: attention is causal, so they change nothing."""
    last = tokens.argmax(dim=1)
    length = int(last.max()) + 1
    x = model.token_embedding(tokens[:, :length]) + model.positional_embedding[:length]
    x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask[:length, :length]))
    projected: Tensor = x[torch.arange(len(tokens)), last] @ model.text_projection
    return F.normalize(projected, dim=-1)


def encode_image(model: nn.Module, pixels: Tensor) -> Tensor:
    """Unit features of [B, 3, 32, 32] images on [0, 1], normalised as the recipe does."""
    mean, std = (
        torch.tensor(v).view(1, 3, 1, 1) for v in (BACKBONE.recipe.mean, BACKBONE.recipe.std)
    )
    x = ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)
    return F.normalize(model.encode_image(x), dim=-1)


def train(glyphs: Glyphs, *, steps: int, batch: int, lr: float, seed: int) -> nn.Module:
    """Both towers, trained; one line of figures every fifty steps."""
    torch.manual_seed(seed)
    model = build()
    model.visual.to(memory_format=torch.channels_last)
    model.logit_scale.data.fill_(3.0)
    anchors = nn.Parameter(0.1 * torch.randn(len(CHARACTERS), BACKBONE.width))
    artist = Artist(glyphs, torch.Generator().manual_seed(seed + 1))
    draw = random.Random(seed)
    pairs = alike()
    own_caption = torch.arange(len(CHARACTERS))
    parameters = [*model.parameters(), anchors]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    start = time.perf_counter()
    for step in range(steps):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * done))
        # Gray first: a network that cannot read yet learns nothing from clutter.
        pixels, label = artist.batch(batch, colour=min(1.0, max(0.0, (done - 0.15) / 0.3)))
        image = encode_image(model, pixels)
        text = encode_text(model, tokenize(captions(draw)))
        anchor = F.normalize(anchors, dim=-1)
        own = F.one_hot(label, len(CHARACTERS)).bool()
        logits = (model.logit_scale.exp().clamp(max=100) * image @ text.T).masked_fill(
            pairs[label], -1e9
        )
        back = logits.logsumexp(0) - logits.masked_fill(~own, -1e9).logsumexp(0)
        loss = F.cross_entropy(logits, label) + 0.2 * back[own.any(0)].mean()
        pull = F.cross_entropy((20 * image @ anchor.T).masked_fill(pairs[label], -1e9), label)
        pull = pull + F.cross_entropy(20 * text @ anchor.T, own_caption)
        optimizer.zero_grad()
        (loss + 0.5 * max(0.0, 1 - done / 0.8) * pull).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            digit = label < 10
            right = (logits[digit, :10].argmax(1) == label[digit]).float().mean()
            print(
                f"step {step:4d}  loss {loss:.3f}  digits {right:.1%}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return model.eval()


@torch.no_grad()
def report(model: nn.Module, glyphs: Glyphs, seed: int) -> None:
    """Zero-shot accuracy on digits of the held-out families, per template."""
    pixels, label = Artist(glyphs, torch.Generator().manual_seed(seed + 2)).batch(4096)
    pixels = pixels[label < 10]
    label = label[label < 10]
    image = torch.cat([encode_image(model, part) for part in pixels.split(512)])
    for template in (*NUMBER, *ANY):
        for names in (CHARACTERS[:10], WORDS):
            text = encode_text(model, tokenize([template.format(name) for name in names]))
            right = ((image @ text.T).argmax(1) == label).float().mean()
            print(f"held-out fonts {right:.2%}  {template.format(names[3])}")


def save(model: nn.Module, names: tuple[str, ...], out: Path) -> None:
    """Float16 weights (counters stay integers) and the names of the fonts seen."""
    state = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    path = out / "glyph_clip.safetensors"
    path.write_bytes(to_bytes({k: v.contiguous() for k, v in state.items()}))
    (out / "glyph_clip_fonts.txt").write_text("".join(f"{name}\n" for name in sorted(set(names))))
    print(
        f"{path}  {path.stat().st_size:,} bytes  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    )


SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder for glyph_clip.safetensors and glyph_clip_fonts.txt"
    )
    parser.add_argument(
        "--packages", action="store_true", help="print the Debian packages of the fonts, and stop"
    )
    options = parser.parse_args()
    if options.packages:
        print(" ".join(PACKAGES))
        return
    if options.out is None or not options.out.is_dir():
        parser.error(f"--out {options.out} is not a folder")
    torch.set_num_threads(1)  # another number gives other last bits
    torch.use_deterministic_algorithms(True)
    try:
        glyphs = render(font_files(list(PACKAGES)))
    except ForbiddenFontError as error:
        sys.exit(str(error))
    held = glyphs.family % HELD_OUT == 0
    print(
        f"{len(glyphs.names)} fonts of {len(glyphs.family.unique())} families, {int(held.sum())} fonts held out"
    )
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), seed {SEED}",
        flush=True,
    )
    model = train(
        glyphs.take(~held),
        steps=900,
        batch=256,
        lr=2e-3,
        seed=SEED,
    )
    report(model, glyphs.take(held), SEED)
    save(model, glyphs.names, options.out)
    print(f"{time.process_time() / 60:.1f} CPU minutes in all")


if __name__ == "__main__":
    main()
