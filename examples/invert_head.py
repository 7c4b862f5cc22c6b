"""What a linear head's gradient tells of the row it was made from: everything.

    python examples/invert_head.py

One step of SGD on one row moves class c's weights by -lr (p_c - [y = c]) x and its bias by -lr (p_c - [y = c]), so the
quotient of what a client sends is its feature x, and the one class whose bias rises is its label. With a batch, the
quotients are mixtures of its rows; of a class that one row has, it is nearly that row. The pictures here are the
features (8 x 8 digits), so what comes back can be looked at.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits

SHADES = " .:-=+*#%@"


def draw(x: np.ndarray) -> str:
    """An 8 x 8 picture in characters."""
    scaled = (x - x.min()) / max(float(x.max() - x.min()), 1e-12)
    return "\n".join(
        "".join(2 * SHADES[int(v * 9.99)] for v in row) for row in scaled.reshape(8, 8)
    )


def sent(
    rows: torch.Tensor, labels: torch.Tensor, lr: float = 0.1
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a client sends after one step on a head of zeros: its change of W [10, 64] and b [10]."""
    W = torch.zeros(10, 64, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(rows @ W.T + b, labels).backward()
    assert W.grad is not None
    assert b.grad is not None
    return -lr * W.grad, -lr * b.grad


def inverted(dW: torch.Tensor, db: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The label and the feature behind an update."""
    label = int(db.argmax())
    return label, dW[label] / db[label]


def main() -> None:
    """One row exactly; a batch of ten, one of each class, nearly."""
    x, y = load_digits(return_X_y=True)
    rows, labels = torch.from_numpy(x), torch.from_numpy(y)
    label, found = inverted(*sent(rows[:1], labels[:1]))
    print(f"A client with one row, label {int(labels[0])}. From its update: label {label}, and")
    print(draw(found.numpy()))
    print(
        f"largest difference from the client's own row: {float((found - rows[0]).abs().max()):.1e}\n"
    )

    ten = torch.stack([(labels == c).nonzero()[0, 0] for c in range(10)])
    dW, _ = sent(rows[ten], labels[ten])
    # every row pulls each class by 1/100, and its own by another -1/10: what one row adds stands out of the mean
    mixed = dW - dW.mean(0)
    likeness = torch.nn.functional.cosine_similarity(mixed, rows[ten] - rows[ten].mean(0), dim=1)
    print(
        f"A client with ten rows, one of each class: cosine of its update with its rows, less their mean: "
        f"{float(likeness.min()):.3f} at the least."
    )


if __name__ == "__main__":
    main()
