"""``onnx:FILE``: an image encoder as one ONNX file, computed by onnxruntime (extra ``onnx``) on the CPU.

A file does not contain the norm of float inputs, so it is ImageNet's unless a recipe has another one. Only the bytes of
this file are read. Weights in separate files are refused, because the digest would not cover them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights
from fedcache.extract.backbones.own import Choice, unchanged_bytes
from fedcache.extract.backbones.own_files import FileEncoder, ImageInput, derive_file, load_file
from fedcache.extract.recipe import Recipe
from fedcache.optional import needed_library, reason
from fedcache.plugins import ONNX

TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(uint8)": "uint8",
}
"""ONNX type of an input of images -> numpy dtype."""


def derive(name: str, choice: Choice) -> Backbone:
    """The row of ``onnx:FILE``; raises as ``derive_file``."""
    return derive_file(name, ONNX, choice, provider="onnx_file", norm="imagenet", opened=_opened)


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The encoder of a file, on the CPU; raises as ``load_file``."""
    return load_file(_opened, backbone, weights, recipe, device, dtype)


def _opened(
    name: str, path: Path, sha256: str, requested: str | None, recipe: Recipe, threads: int
) -> FileEncoder:
    """The encoder of a file. Raises UsageError for an unknown output, and for several outputs if none was chosen."""
    session = _session(name, path, unchanged_bytes(path, sha256), threads=threads)
    given = _input(name, session)
    outputs = [out.name for out in session.get_outputs()]
    output = requested
    if output is None:
        if len(outputs) != 1:
            first = "NAME"
            if outputs:
                first = outputs[0]
            raise UsageError(
                f"{name} has {len(outputs)} outputs ({', '.join(outputs[:20])}), but none was chosen.",
                f"--recipe {shell_word(f'{name}:output={first}')}",
            )
        (output,) = outputs
    if output not in outputs:
        raise unknown(f"output of {name}", output, outputs)

    def compute(images: NDArray[Any]) -> NDArray[Any]:
        (found,) = session.run([output], {given.name: images})
        features: NDArray[Any] = found
        return features

    return FileEncoder(name, given, outputs, output, recipe, compute)


def _known_length(axis: Any) -> int | None:
    """The length of an axis; None for one that is free."""
    if isinstance(axis, int) and axis > 0:
        return axis
    return None


def _input(name: str, session: Any) -> ImageInput:
    """The only input of a file, which must be one of images. Raises UsageError."""
    inputs = session.get_inputs()
    if len(inputs) == 1:
        (only,) = inputs
        shape = tuple(map(_known_length, only.shape))
        is_of_images = len(shape) == 4 and 3 in (shape[1], shape[3])
        if is_of_images and only.type in TYPES:
            return ImageInput(only.name, shape, np.dtype(TYPES[only.type]))
    shown = "; ".join(f"{given.name} {given.type} {given.shape}" for given in inputs[:5])
    raise UsageError(
        f"The inputs of {name} are {shown or 'nothing'}. fedcache expects one input of images: floats or uint8 with "
        "the shape [N, 3, H, W] or [N, H, W, 3].",
        "Export the image encoder alone, with one input.",
    )


def _session(name: str, path: Path, raw: bytes, *, threads: int) -> Any:
    """A session over the bytes of a file; MachineError without onnxruntime or for a file that it refuses."""
    ort = needed_library("onnxruntime", name, "onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 4  # no warnings: errors are raised
    # onnxruntime would look for separate weights in the working directory, so give it an empty folder instead.
    with tempfile.TemporaryDirectory() as empty:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", empty
        )
        try:
            return ort.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            # The parser reads untrusted bytes, so any error means that the file cannot be loaded.
            if "xternal data" in str(error):  # with a capital or a small letter
                raise MachineError(
                    f"{path} is not loaded, because its weights are in separate files, which its sha256 "
                    "does not cover.",
                    'Write one file (pip install onnx):  python -c "import onnx, sys; '
                    f"onnx.save(onnx.load(sys.argv[1]), 'one.onnx')\" {shell_word(path)}",
                ) from error
            raise MachineError(
                f"{path} is not loaded: onnxruntime cannot load it ({reason(error)}).",
                "Get or export the file again. If onnxruntime is too old for the file:  pip install -U onnxruntime",
            ) from error
