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


def classifier(path, *, kind="float32", side=8, classes=4, softmax=True):
    """Images [1, side, side, 3] -> ``colour`` [1, 1, 1, 3], their mean -> ``scores`` [1, classes] (-> ``chances``).

    Class k has weight k + 1 for the first channel and none for others, so that a score is (k + 1) times red.
    """
    made = schema.ModelT()
    made.version = 3
    made.buffers = [schema.BufferT()]
    quantised = kind != "float32"
    zero = 128 if kind == "uint8" else 0

    def tensor(name, shape, scale, values=None, of=kind):
        t = schema.TensorT()
        t.name, t.shape, t.type, t.buffer = (
            name.encode(),
            shape,
            KINDS.get(of, schema.TensorType.INT32),
            0,
        )
        if scale is not None and quantised:
            t.quantization = schema.QuantizationParametersT()
            t.quantization.scale = [scale]
            t.quantization.zeroPoint = [
                0 if of == "int32" else 1 if values is not None and of == "uint8" else zero
            ]
        if values is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(values.tobytes(), np.uint8)
            made.buffers.append(buffer)
            t.buffer = len(made.buffers) - 1
        return t

    weights = np.zeros((classes, 3), np.int64)
    weights[:, 0] = np.arange(classes) + 1
    # Unsigned weights have the zero point 1 (one of 0 is refused by some kernels), signed ones 0.
    stored = (weights + (kind == "uint8")).astype(kind)
    bias = np.zeros(classes, np.int32 if quantised else np.float32)
    graph = schema.SubGraphT()
    graph.tensors = [
        tensor("images", [1, side, side, 3], SCALE),
        tensor("colour", [1, 1, 1, 3], SCALE),
        tensor("weights", [classes, 3], 1.0, stored),
        tensor("bias", [classes], SCALE, bias, "int32" if quantised else "float32"),
        tensor("scores", [1, classes], SCALE * classes),
    ]
    graph.operators = [
        operation(made, schema.BuiltinOperator.AVERAGE_POOL_2D, [0], [1], pooling(side)),
        operation(
            made,
            schema.BuiltinOperator.FULLY_CONNECTED,
            [1, 2, 3],
            [4],
            schema.FullyConnectedOptionsT(),
        ),
    ]
    if softmax:
        chances = tensor("chances", [1, classes], 1 / 256)
        if quantised:
            chances.quantization.zeroPoint = [0 if kind == "uint8" else -128]
        graph.tensors.append(chances)
        options = schema.SoftmaxOptionsT()
        options.beta = 1.0
        graph.operators.append(operation(made, schema.BuiltinOperator.SOFTMAX, [4], [5], options))
    graph.inputs, graph.outputs = [0], [5 if softmax else 4]
    made.subgraphs = [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(made.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return path


def mean_colour(path):
    """Images [1, 3, H, W] with free sides -> ``colour`` [1, 3], their mean."""
    made = schema.ModelT()
    made.version = 3
    axes = schema.BufferT()
    axes.data = np.frombuffer(np.array([2, 3], np.int32).tobytes(), np.uint8)
    made.buffers = [schema.BufferT(), axes]
    graph = schema.SubGraphT()
    graph.tensors = []
    for name, shape, kind in (
        ("images", [1, 3, 1, 1], schema.TensorType.FLOAT32),
        ("axes", [2], schema.TensorType.INT32),
        ("colour", [1, 3], schema.TensorType.FLOAT32),
    ):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type = name.encode(), shape, kind
        tensor.buffer = int(name == "axes")
        graph.tensors.append(tensor)
    graph.tensors[0].shapeSignature = [-1, 3, -1, -1]
    graph.operators = [
        operation(made, schema.BuiltinOperator.MEAN, [0, 1], [2], schema.ReducerOptionsT())
    ]
    graph.inputs, graph.outputs = [0], [2]
    made.subgraphs = [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(made.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return path


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
