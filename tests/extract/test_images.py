"""Decoding and resizing: what a decoded image is, and that nothing bad gets through or gets in the way."""

import io
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_images import encoded, pixels
from PIL import Image, PngImagePlugin
from refusal import bad_image

from fedcache import Recipe
from fedcache.extract import images
from fedcache.extract.image_files import MAX_BYTES, BadImage
from fedcache.extract.images import MAX_PIXELS, decode, from_pillow, quiet, resize


def recipe(**changes):
    return Recipe(**{"backbone": "b", "weights": "none", "size": 4, **changes})


def flat(colour, size=(5, 3), mode="RGB"):
    return Image.new(mode, size, colour)


def png_of_size(width, height):
    """The PNG of one black pixel, whose header says another size."""
    raw = bytearray(encoded(flat(0, (1, 1), "1")))
    raw[16:24] = struct.pack(">II", width, height)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


def test_lossless_formats_give_the_pixels_back():
    image = pixels(1)
    for kind, options in (
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("PPM", {}),
        ("WEBP", {"lossless": True}),
    ):
        assert np.array_equal(np.asarray(decode(encoded(image, kind, **options))), image)


def test_a_jpeg_is_decoded_as_pillow_decodes_it_at_full_size():
    raw = encoded(np.tile(pixels(4), (40, 40, 1)), "JPEG")
    with Image.open(io.BytesIO(raw)) as image:
        assert np.array_equal(np.asarray(decode(raw)), np.asarray(image.convert("RGB")))


def test_gray_becomes_three_equal_channels_from_bytes_and_arrays():
    gray = pixels(5)[:, :, 0]
    for raw in (encoded(gray), gray):
        assert np.array_equal(np.asarray(decode(raw)), np.repeat(gray[:, :, None], 3, axis=2))


def test_sixteen_bit_gray_keeps_the_high_byte():
    values = np.array([[0, 255, 256, 0x1234, 0xFFFF]], dtype=np.uint16)
    raw = [encoded(Image.fromarray(values), kind) for kind in ("PNG", "TIFF")]
    for file in (*raw, b"P5 5 1 65535\n" + values.astype(">u2").tobytes()):
        assert np.asarray(decode(file))[0, :, 0].tolist() == [0, 0, 1, 0x12, 0xFF]


def test_transparency_is_over_white_for_every_colour_beneath():
    image = Image.new("RGBA", (3, 1), (200, 10, 10, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    # 128/255 of black over white: 255 * (1 - 128/255) = 127
    image.putpixel((2, 0), (0, 0, 0, 128))
    assert np.asarray(decode(encoded(image)))[0].tolist() == [[255] * 3, [10, 20, 30], [127] * 3]
    key = encoded(flat((9, 9, 9)), transparency=(9, 9, 9))
    assert np.asarray(decode(key)).min() == 255


def test_a_transparent_palette_entry_is_white():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    for kind, transparency in (("PNG", bytes([0, 255])), ("GIF", 0)):
        seen = np.asarray(decode(encoded(image, kind, transparency=transparency)))
        assert seen[0].tolist() == [[255] * 3, [0, 255, 0]]


def test_an_animation_is_its_first_frame():
    raw = encoded(flat((255, 0, 0)), "GIF", save_all=True, append_images=[flat((0, 0, 255))])
    assert np.asarray(decode(raw))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation_is_undone(kind):
    upright = np.zeros((16, 32, 3), dtype=np.uint8)
    upright[:8, :16], upright[:8, 16:], upright[8:, :16] = (240, 0, 0), (0, 240, 0), (0, 0, 240)
    # How a camera that was held so stores the scene (EXIF 2.3, 4.6.4): the inverse of the turn a viewer makes.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }
    lossy = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    for orientation, image in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        got = np.asarray(
            decode(encoded(np.ascontiguousarray(image), kind, exif=exif, **lossy))
        ).astype(int)
        assert got.shape == upright.shape
        assert np.abs(got - upright).max() <= (8 if lossy else 0)


def test_broken_exif_does_not_cost_the_image():
    raw = encoded(pixels(6), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 20)
    assert decode(raw).size == (8, 6)


def test_a_colour_profile_is_not_applied():
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    image = pixels(7)
    assert np.array_equal(np.asarray(decode(encoded(image, icc_profile=profile))), image)


def test_truncated_files_are_bad():
    for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        raw = encoded(np.tile(pixels(8), (10, 10, 1)), kind)
        bad_image(decode, raw[: len(raw) * 2 // 3])


def test_what_is_no_image_is_refused_without_a_word_of_what_it_holds():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    for raw in (
        b"<!DOCTYPE html><html>",
        b"just some text",
        b"\xff\xd8\xff",
        postscript,
        bytes(100),
    ):
        with pytest.raises(BadImage) as caught:
            decode(raw)
        assert str(caught.value) == "it has no image format fedcache reads"
    bad_image(decode, b"", "empty")


def test_a_file_above_the_byte_limit_is_bad():
    bad_image(
        decode, b"\x89PNG" + bytes(MAX_BYTES - 3), "67,108,865 bytes; the limit is 67,108,864"
    )


@pytest.mark.parametrize("side", [30_000, 12_000])
def test_a_pixel_bomb_is_refused_from_its_header(side, monkeypatch):
    monkeypatch.setattr(
        PngImagePlugin.PngImageFile, "load", lambda _image: pytest.fail("the pixels were decoded")
    )
    bad_image(decode, png_of_size(side, side), "64,000,000")


def test_the_largest_image_allowed_is_decoded():
    assert decode(encoded(Image.new("1", (8000, 8000)))).size == (8000, 8000)
    assert MAX_PIXELS == 8000 * 8000


def test_one_pixel_is_an_image_and_a_thread_is_not():
    assert (
        resize(decode(encoded(flat((1, 2, 3), (1, 1)))), recipe()).tolist() == [[[1, 2, 3]] * 4] * 4
    )
    for size in ((1, 20_000), (20_000, 1), (1, 101)):
        bad_image(decode, encoded(flat(0, size, "L")), f"{size[0]} x {size[1]} pixels")
    assert decode(encoded(flat(0, (1, 100), "L"))).size == (1, 100)


def test_images_without_an_eight_bit_range_are_bad():
    bad_image(
        decode,
        encoded(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"),
        "floating-point",
    )
    bad_image(
        decode, encoded(Image.fromarray(np.full((2, 2), 70_000, dtype=np.int32)), "TIFF"), "32-bit"
    )


def test_a_mode_that_the_library_does_not_convert_is_a_reason(monkeypatch):
    def refuses(image):
        raise ValueError("conversion not supported")

    monkeypatch.setattr(images, "_to_rgb", refuses)
    bad_image(decode, encoded(Image.new("LAB", (2, 2)), "TIFF"), "TIFF image of mode LAB")
    bad_image(from_pillow, Image.new("LAB", (2, 2)), "mode LAB")


@pytest.mark.parametrize("place", ["open", "load", "getexif"])
def test_memory_that_runs_out_is_not_the_fault_of_the_image(place, monkeypatch):
    def no_memory(*_args, **_kwargs):
        raise MemoryError("no memory")

    raw = encoded(pixels(1))
    monkeypatch.setattr(Image if place == "open" else Image.Image, place, no_memory)
    if place == "load":
        monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", no_memory)
    with pytest.raises(MemoryError, match=r"^no memory$"):
        decode(raw)


def test_arrays_of_another_kind_are_bad():
    for shape, dtype in (((2, 2), "f4"), ((2, 2, 4), "u1"), ((0, 2), "u1"), ((4,), "u1")):
        bad_image(decode, np.zeros(shape, dtype), "uint8")


@given(st.data())
@settings(max_examples=60)
def test_damage_anywhere_gives_an_image_or_a_reason_that_is_the_same_every_time(data):
    raw = bytearray(
        encoded(
            pixels(9), data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"]))
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(np.asarray(decode(bytes(raw))).tobytes())
        except BadImage as bad:
            reason = str(bad)
            assert not any(word in reason for word in ("0x", "<", "/"))
            outcomes.append(reason)
    assert outcomes[0] == outcomes[1]


def test_no_warning_leaks_and_the_filters_are_as_before():
    # Bytes transparency of a palette image, an oversized image and broken EXIF make Pillow warn.
    raw = [encoded(Image.new("P", (2, 1)), transparency=bytes([0])), png_of_size(9500, 9500)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        decode(raw[0])
        bad_image(decode, raw[1])
        assert warnings.filters == before
    assert caught == []


def test_overlapping_threads_restore_the_filters_whichever_ends_first():
    before = list(warnings.filters)
    inside = threading.Event()
    leave = threading.Event()

    def other():
        with quiet:
            inside.set()
            leave.wait(200)

    thread = threading.Thread(target=other)
    with quiet:
        thread.start()
        assert inside.wait(200)
    # an error under this suite's filters
    warnings.warn("still quiet: the other thread decodes", stacklevel=1)
    leave.set()
    thread.join()
    assert warnings.filters == before


def test_crop_is_torchvisions_resize_and_centre_crop():
    transforms = pytest.importorskip("torchvision.transforms")
    for seed, (height, width) in enumerate([(37, 61), (61, 37), (48, 48), (20, 90), (33, 34)]):
        image = Image.fromarray(pixels(seed, height, width))
        for name in ("bicubic", "bilinear"):
            mode = transforms.InterpolationMode[name.upper()]
            # 24 / 0.875 = 27.4
            oracle = transforms.Compose([transforms.Resize(27, mode), transforms.CenterCrop(24)])
            got = resize(image, recipe(size=24, crop_pct=0.875, interpolation=name))
            assert np.array_equal(got, np.asarray(oracle(image)))


def test_squash_resizes_both_sides():
    image = Image.fromarray(pixels(1, 30, 70))
    got = resize(image, recipe(size=16, resize="squash"))
    assert np.array_equal(got, np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)))


def test_size_zero_keeps_the_pixels_and_the_native_size_is_exact():
    image = pixels(2, 9, 9)
    assert np.array_equal(resize(Image.fromarray(image), recipe(size=0)), image)
    assert np.array_equal(resize(Image.fromarray(image), recipe(size=9)), image)


@given(st.integers(1, 80), st.integers(1, 80), st.integers(8, 40), st.floats(0.1, 1.0))
@settings(max_examples=60)
def test_every_allowed_image_becomes_the_square_asked_for(height, width, size, crop_pct):
    out = resize(Image.new("RGB", (width, height)), recipe(size=size, crop_pct=crop_pct))
    assert out.shape == (size, size, 3)
    assert out.dtype == np.uint8


def test_a_resize_beyond_the_pixel_limit_is_bad():
    with pytest.raises(BadImage, match="would be resized to 4096 x 409600"):
        resize(Image.new("RGB", (1, 100)), recipe(size=2048, crop_pct=0.5))


def test_a_pillow_image_without_pixels_is_bad():
    for size in ((0, 5), (5, 0), (0, 0)):
        bad_image(from_pillow, Image.new("RGB", size), f"{size[0]} x {size[1]}")


def test_cmyk_is_converted():
    # no cyan, full magenta and yellow
    got = np.asarray(decode(encoded(flat((0, 255, 255, 0), mode="CMYK"), "TIFF")))
    assert got[0, 0].tolist() == [255, 0, 0]
    assert decode(encoded(flat((0, 0, 0, 0), mode="CMYK"), "JPEG")).mode == "RGB"
