"""``tflite:FILE``: an image encoder as one TFLite file, computed by LiteRT (extra ``tflite``) on the CPU.

A quantised input receives the pixels themselves, as its scale and zero point declare. A quantised output is converted
with the scale and zero point in the file. fedcache has names for three files: MobileNetV2 (Sandler et al.,
arXiv:1801.04381) trained on ImageNet, and on the birds and the insects of iNaturalist, so that differently trained
backbones of one width are available offline. Their feature is the input of the classifier, 1,280 wide.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word, unknown
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, Weights
from fedcache.extract.backbones.own import Choice, unchanged_bytes
from fedcache.extract.backbones.own_files import FileEncoder, ImageInput, derive_file, load_file
from fedcache.extract.backbones.rows import PENULTIMATE
from fedcache.extract.recipe import Recipe
from fedcache.optional import needed_library, reason
from fedcache.plugins import TFLITE

# This section reads the layers of a TFLite file, and makes the same file with another tensor as its output. The
# interpreter gives the tensor that the graph declares as output. For a classifier these are scores, but a feature is a
# tensor inside the graph. The declaration is a list of numbers of tensors. With another number in it, the interpreter
# gives that tensor and optimises the graph for it. The readers of the schema come with the interpreter's library. Files
# are untrusted, so every number that refers to an entry is compared with the number of entries first.


@dataclass(frozen=True)
class Layer:
    """One operation of a graph, with the numbers of its tensors."""

    inputs: tuple[int, ...]  # without optional ones that are absent
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """The main graph of a file."""

    names: tuple[str, ...]  # of the tensors
    weights: frozenset[int]  # constant tensors with two or more axes
    constants: frozenset[int]  # all tensors with their content in the file
    layers: tuple[Layer, ...]  # in the order of computation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def penultimate(self, name: str) -> int:
        """The input of the last layer with weights before the first output. Raises UsageError without such a layer."""
        layer_of = {}
        for layer in self.layers:
            for output in layer.outputs:
                layer_of[output] = layer
        # Walk back from the first output, through the first input of each layer that is not a constant. The number of
        # layers limits the steps, because a damaged file may have a cycle.
        tensor = self.outputs[0]
        for _ in self.layers:
            if tensor not in layer_of:
                break
            inputs = layer_of[tensor].inputs
            variable = [number for number in inputs if number not in self.constants]
            if not variable:
                break
            tensor = variable[0]
            if any(number in self.weights for number in inputs):
                if tensor in self.inputs:
                    break
                return tensor
        raise UsageError(
            f"output={PENULTIMATE} is the input of the classifier, but in {name} no layer comes before a classifier.",
            f"--recipe {shell_word(name)}:output={shell_word(self.names[self.outputs[0]])}",
        )


def read_graph(raw: bytes, path: Path, name: str) -> Graph:
    """The main graph of a file; MachineError for bytes that are not a TFLite file."""
    schema = needed_library("ai_edge_litert.schema_py_generated", name, "tflite")
    try:
        return _graph(schema, raw)
    except FedcacheError:
        raise
    except Exception as error:
        # The reader reads untrusted bytes, so any error means that they are not a TFLite file.
        raise MachineError(
            f"{path} is not loaded: it is not a TFLite file, or it is damaged ({reason(error)}).",
            "Get the file again.",
        ) from error


def _graph(schema: Any, raw: bytes) -> Graph:
    if not schema.Model.ModelBufferHasIdentifier(raw, 0):
        raise ValueError("it does not contain the mark TFL3")
    model = schema.Model.GetRootAs(raw, 0)
    main = model.Subgraphs(0)
    most = len(raw) // 4  # every entry of every list takes four bytes at least
    tensor_count = main.TensorsLength()
    operator_count = main.OperatorsLength()
    given_count = main.InputsLength()
    result_count = main.OutputsLength()
    counts = (tensor_count, operator_count, given_count, result_count)
    if max(counts) > most or min(counts) < 1:
        raise ValueError(f"its lists have {counts} entries, but the file has only {len(raw)} bytes")
    names = []
    weights = set()
    constants = set()
    for number in range(tensor_count):
        tensor = main.Tensors(number)
        names.append((tensor.Name() or b"").decode("utf-8", "replace"))
        buffer = _below(tensor.Buffer(), model.BuffersLength())
        if model.Buffers(buffer).DataLength():
            constants.add(number)
            if tensor.ShapeLength() > 1:
                weights.add(number)
    layers = []
    for number in range(operator_count):
        operation = main.Operators(number)
        input_count = _below(operation.InputsLength(), most)
        read = [operation.Inputs(place) for place in range(input_count)]
        output_count = _below(operation.OutputsLength(), most)
        made = [operation.Outputs(place) for place in range(output_count)]
        # -1 is an optional operand that is absent.
        inputs = tuple(_below(tensor, tensor_count) for tensor in read if tensor != -1)
        outputs = tuple(_below(tensor, tensor_count) for tensor in made if tensor != -1)
        layers.append(Layer(inputs, outputs))
    inputs = tuple(_below(main.Inputs(place), tensor_count) for place in range(given_count))
    outputs = tuple(_below(main.Outputs(place), tensor_count) for place in range(result_count))
    return Graph(
        tuple(names), frozenset(weights), frozenset(constants), tuple(layers), inputs, outputs
    )


def _below(number: int, end: int) -> int:
    if not 0 <= number < end:
        raise ValueError(f"it refers to entry {number} of a list with {end} entries")
    return number


def chosen_tensor(graph: Graph, name: str, requested: str | None) -> int:
    """The number of the requested output: a tensor by name, ``penultimate``, or None for the only output.

    Raises UsageError for an unknown tensor, and for None with several outputs.
    """
    if requested == PENULTIMATE:
        return graph.penultimate(name)
    computed = {}
    for layer in graph.layers:
        for tensor in layer.outputs:
            computed[graph.names[tensor]] = tensor
    outputs = [graph.names[tensor] for tensor in graph.outputs]
    if requested is None and len(outputs) == 1:
        return graph.outputs[0]
    listed = ", ".join(outputs[:20])
    hint = f"--recipe {shell_word(name)}:output={PENULTIMATE} selects the input of the classifier; outputs: {listed}"
    if requested is None:
        raise UsageError(f"{name} has {len(outputs)} outputs, but none was chosen.", hint)
    if requested not in computed:
        raise unknown(f"output of {name}", requested, computed, hint=hint)
    return computed[requested]


def with_output(raw: bytes, tensor: int, name: str) -> bytes:
    """The file with a tensor as its first output."""
    schema = needed_library("ai_edge_litert.schema_py_generated", name, "tflite")
    changed = bytearray(raw)
    outputs = schema.Model.GetRootAs(changed, 0).Subgraphs(0).OutputsAsNumpy()
    outputs[0] = tensor  # ``outputs`` is a view of ``changed``
    return bytes(changed)


TYPES = ("uint8", "int8", "float32")


def derive(name: str, choice: Choice) -> Backbone:
    """The row of ``tflite:FILE``; raises as ``derive_file``."""
    return derive_file(name, TFLITE, choice, provider="tflite_file", norm="half", opened=_opened)


def load(
    backbone: Backbone, weights: Weights, recipe: Recipe, *, device: str, dtype: str
) -> FrozenEncoder:
    """The encoder of a file, on the CPU; raises as ``load_file``."""
    return load_file(_opened, backbone, weights, recipe, device, dtype)


def _opened(
    name: str, path: Path, sha256: str, requested: str | None, recipe: Recipe, threads: int
) -> FileEncoder:
    """The encoder of a file; UsageError for an output that it does not have or that is quantised by channel."""
    raw = unchanged_bytes(path, sha256)
    graph = read_graph(raw, path, name)
    tensor = chosen_tensor(graph, name, requested)
    if tensor != graph.outputs[0]:
        raw = with_output(raw, tensor, name)
    interpreter = _interpreter(name, path, raw, threads)
    given, input_number = _input(name, _details(path, interpreter.get_input_details))
    size = recipe.size
    try:
        if None in given.shape[1:]:
            lengths = [length or size for length in given.shape[1:]]
            interpreter.resize_tensor_input(input_number, [1, *lengths])
        with _quiet():
            interpreter.allocate_tensors()
    except Exception as error:
        raise UsageError(
            f"{name} cannot process images of {size} px: {reason(error)}",
            f"Give the size that the model was made for:  --recipe {shell_word(name)}:size=N",
        ) from error
    outputs = [graph.names[number] for number in graph.outputs]
    outputs.append(PENULTIMATE)
    output = requested or graph.names[tensor]
    (detail, *_) = _details(path, interpreter.get_output_details)
    scales = detail["quantization_parameters"]["scales"]
    if len(scales) > 1 or np.dtype(detail["dtype"]).kind not in "iuf":
        raise UsageError(
            f"The output {output} of {name} has {len(scales)} quantisation scales and the type {detail['dtype']}. "
            "Expected at most one scale, and integers or floating-point numbers.",
            f"--recipe {shell_word(name)}:output={PENULTIMATE}",
        )
    # Scale and zero point of a quantised output; both are 0 for an output of floats.
    scale = float(detail["quantization"][0])
    zero_point = int(detail["quantization"][1])

    def compute(images: NDArray[Any]) -> NDArray[Any]:
        interpreter.set_tensor(input_number, images)
        interpreter.invoke()
        out: NDArray[Any] = interpreter.get_tensor(detail["index"])
        if scale:
            return (out.astype(np.float32) - zero_point) * np.float32(scale)
        return out

    return FileEncoder(name, given, outputs, output, recipe, compute)


def _details(path: Path, details: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The details of tensors by an interpreter. Raises MachineError if it fails on the file."""
    try:
        return details()
    except Exception as error:  # such as names that are not text, in a damaged file
        raise MachineError(
            f"{path} is not loaded: it is damaged ({reason(error)}).", "Get the file again."
        ) from error


def _input(name: str, inputs: list[dict[str, Any]]) -> tuple[ImageInput, int]:
    """The only input of a file, which must be one of images, and the number of its tensor. Raises UsageError."""
    shown = []
    for given in inputs[:5]:
        shape = list(given["shape_signature"])
        shown.append(f"{given['name']} {np.dtype(given['dtype'])} {shape}")
    if len(inputs) == 1:
        (only,) = inputs
        # -1 is an axis of any length.
        lengths = [int(length) if length > 0 else None for length in only["shape_signature"]]
        dtype = np.dtype(only["dtype"])
        is_of_images = len(lengths) == 4 and 3 in (lengths[1], lengths[3])
        if is_of_images and str(dtype) in TYPES:
            batch = int(only["shape"][0])  # 1 for any number of images
            return ImageInput(only["name"], (batch, *lengths[1:]), dtype), int(only["index"])
    raise UsageError(
        f"The inputs of {name} are {'; '.join(shown) or 'nothing'}. fedcache expects one input of images: "
        f"{', '.join(TYPES)} with the shape [N, H, W, 3] or [N, 3, H, W].",
        "Convert the image encoder alone, with one input.",
    )


def _interpreter(name: str, path: Path, raw: bytes, threads: int) -> Any:
    """An interpreter of the bytes of a file; MachineError if it cannot load them."""
    library = needed_library("ai_edge_litert.interpreter", name, "tflite")
    try:
        with _quiet():
            return library.Interpreter(model_content=raw, num_threads=threads)
    except Exception as error:
        # The parser reads untrusted bytes, so any error means that the file cannot be loaded.
        raise MachineError(
            f"{path} is not loaded: LiteRT cannot load it ({reason(error)}).",
            "Get or convert the file again. If LiteRT is too old for the file:  pip install -U ai-edge-litert",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard the output of native code to stderr while a block runs; interpreters list their optimisations there."""
    stderr = os.dup(2)
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)
