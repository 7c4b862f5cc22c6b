"""Tiny TFLite files whose tensors can be worked by hand: images, their mean colour, a classifier."""

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

KINDS = {
    "float32": schema.TensorType.FLOAT32,
    "uint8": schema.TensorType.UINT8,
    "int8": schema.TensorType.INT8,
}
SCALE = 1 / 64
"""Of quantised images and colours; their zero points are 128, or 0 where they are signed."""


def tensor(name, shape, kind):
    """A tensor without values; ``int32`` where the kind is none of the input's."""
    made = schema.TensorT()
    made.name = name.encode()
    made.shape = shape
    made.type = KINDS.get(kind, schema.TensorType.INT32)
    made.buffer = 0
    return made


def values_of(model, array):
    """The number of a new buffer of a model, which holds an array."""
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(array.tobytes(), np.uint8)
    model.buffers.append(buffer)
    return len(model.buffers) - 1


def new_model():
    made = schema.ModelT()
    made.version = 3
    made.buffers = [schema.BufferT()]
    return made


def write(model, graph, path):
    """The file of a model of one graph, whose first tensor is its input and whose last one its output."""
    graph.inputs = [0]
    graph.outputs = [len(graph.tensors) - 1]
    model.subgraphs = [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return path


def classifier(path, *, kind="float32"):
    """Images [1, 8, 8, 3] -> ``colour`` [1, 1, 1, 3], their mean -> ``scores`` [1, 4] -> ``chances``.

    Class k has weight k + 1 for the first channel and none for others, so that a score is (k + 1) times red.
    """
    made = new_model()
    quantised = kind != "float32"
    zero = 128 if kind == "uint8" else 0

    def scaled(name, shape, scale, values=None, of=kind):
        t = tensor(name, shape, of)
        if quantised:
            t.quantization = schema.QuantizationParametersT()
            t.quantization.scale = [scale]
            t.quantization.zeroPoint = [
                0 if of == "int32" else 1 if values is not None and of == "uint8" else zero
            ]
        if values is not None:
            t.buffer = values_of(made, values)
        return t

    weights = np.zeros((4, 3), np.int64)
    weights[:, 0] = np.arange(4) + 1
    # Unsigned weights have the zero point 1 (one of 0 is refused by some kernels), signed ones 0.
    stored = (weights + (kind == "uint8")).astype(kind)
    bias = np.zeros(4, np.int32 if quantised else np.float32)
    chances = scaled("chances", [1, 4], 1 / 256)
    if quantised:
        chances.quantization.zeroPoint = [0 if kind == "uint8" else -128]
    softmax = schema.SoftmaxOptionsT()
    softmax.beta = 1.0
    graph = schema.SubGraphT()
    graph.tensors = [
        scaled("images", [1, 8, 8, 3], SCALE),
        scaled("colour", [1, 1, 1, 3], SCALE),
        scaled("weights", [4, 3], 1.0, stored),
        scaled("bias", [4], SCALE, bias, "int32" if quantised else "float32"),
        scaled("scores", [1, 4], SCALE * 4),
        chances,
    ]
    graph.operators = [
        operation(made, schema.BuiltinOperator.AVERAGE_POOL_2D, [0], [1], pooling(8)),
        operation(
            made,
            schema.BuiltinOperator.FULLY_CONNECTED,
            [1, 2, 3],
            [4],
            schema.FullyConnectedOptionsT(),
        ),
        operation(made, schema.BuiltinOperator.SOFTMAX, [4], [5], softmax),
    ]
    return write(made, graph, path)


def mean_colour(path):
    """Images [1, 3, H, W] with free sides -> ``colour`` [1, 3], their mean."""
    made = new_model()
    images = tensor("images", [1, 3, 1, 1], "float32")
    images.shapeSignature = [-1, 3, -1, -1]
    axes = tensor("axes", [2], "int32")
    axes.buffer = values_of(made, np.array([2, 3], np.int32))
    graph = schema.SubGraphT()
    graph.tensors = [images, axes, tensor("colour", [1, 3], "float32")]
    graph.operators = [
        operation(made, schema.BuiltinOperator.MEAN, [0, 1], [2], schema.ReducerOptionsT())
    ]
    return write(made, graph, path)


def pooling(side):
    options = schema.Pool2DOptionsT()
    options.padding = schema.Padding.VALID
    options.strideW = options.strideH = options.filterWidth = options.filterHeight = side
    return options


def operation(model, code, inputs, outputs, options):
    """An operation of a kind that is entered in the model's list."""
    kind = schema.OperatorCodeT()
    kind.builtinCode, kind.deprecatedBuiltinCode, kind.version = code, code, 1
    model.operatorCodes = [*(model.operatorCodes or []), kind]
    made = schema.OperatorT()
    made.opcodeIndex, made.inputs, made.outputs = len(model.operatorCodes) - 1, inputs, outputs
    made.builtinOptions = options
    made.builtinOptionsType = getattr(
        schema.BuiltinOptions, type(options).__name__.removesuffix("T")
    )
    return made
