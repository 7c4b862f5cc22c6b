"""FedCLIP: an attention adapter on CLIP's image features, averaged over clients.

A small network learns a weight for every number of the CLIP image feature; both CLIP encoders stay frozen. Clients
train this network against the class texts. The server averages it.

Lu et al., "FedCLIP: fast generalization and personalization for CLIP in federated learning", IEEE Data Engineering
Bulletin 2023. Both towers stay frozen; a gate of two layers weighs the numbers of an image feature,
    g(x) = softmax(B tanh(A x + a) + b),    z = g(x) * x / |g(x) * x|,    logits = s z.T'.
The gate is all that is trained and sent, 2 D (D + 1) numbers. The loss is that of CLIP on a batch: row i matches the
class text of row i, and not the class texts of the other rows,
    ( CE_i(s z_i.t_y1 .. s z_i.t_yB; i) + CE_i(s z_1.t_yi .. s z_B.t_yi; i) ) / 2,
so that rows of one class in a batch are each other's negatives. ``objective=ce`` (ours) is cross-entropy over classes.

The gate, the loss, Adam at 5e-5 and rounds of one epoch are those of the released code (microsoft/PersonalizedFL,
``fedclip/methods/fed_at_clip.py``). Preset ``official`` also has that code's equal weights of clients, and its Adam
with beta 0.9 and 0.98, epsilon 1e-6 and weight decay 0.2, which starts again in every round. Without the preset, Adam
has torch's constants and no decay. The commands in the repository run 200 rounds, the default here; the program's own
default is 300 (``--rounds 300``). The released code reports the round that is best on validation rows, reads features
before they are brought to unit length (``feat_post=none``), writes class texts as "a picture of a X", and leaves out a
batch of one row, whose loss is 0.

Special cases: A = B = 0 weighs all numbers alike and is ``clip-zs``; the initial model is close to it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from fedcache.federate.methods.common import (
    AGG,
    TRAINING,
    UNIT_FEATURES,
    Batch,
    ClientData,
    Ctx,
    Defaults,
    Hp,
    HParam,
    Method,
    MethodPage,
    Tree,
    affine,
    count_of,
    declare,
    keep_whole_optimiser,
    local,
    model,
    over,
    server_tensors,
    with_official,
    without,
)
from fedcache.federate.methods.common.model import ADAM
from fedcache.heads.linear import init_linear
from fedcache.heads.losses import cross_entropy, mask_logits

NAMES = ("A.W", "A.b", "B.W", "B.b")
"""Names of the gate's tensors."""


def names(_hp: Hp) -> tuple[str, ...]:
    """Names of the tensors that are trained, sent and averaged."""
    return NAMES


def init(ctx: Ctx) -> Tree:
    """Both layers [D, D] and [D], drawn as torch draws them."""
    uniform = ctx.rng.uniform("init")
    D = ctx.env.width
    return {**init_linear(uniform, D, D, "A."), **init_linear(uniform, D, D, "B.")}


def adapted(p: Tree, x: Tensor) -> Tensor:
    """z [.., N, D], the gated features of unit length, of x [.., N, D]."""
    hidden = affine(x, p["A.W"], p["A.b"]).tanh()
    # Attention over features: the gate of a row sums to 1.
    gate = affine(hidden, p["B.W"], p["B.b"]).softmax(-1)
    return normalize(gate * x, dim=-1)


def pair_contrast(u: Tensor, w: Tensor) -> Tensor:
    """CLIP's loss of a batch, one value per client.

    Args:
        u: [.., B, B] logits of row i and the text of row j's class.
        w: [.., B] 1/b on real rows, 0 on padding.
    """
    real = (w > 0).unsqueeze(-2)
    both = u.new_zeros(w.shape)
    for logits in (u, u.mT):  # images among texts, then texts among images
        log_p = mask_logits(logits, real).log_softmax(-1)
        both = both - log_p.diagonal(dim1=-2, dim2=-1)
    return (0.5 * w * both).sum(-1)


def loss(p: Tree, batch: Batch, _down: Tree, ctx: Ctx) -> Tensor:
    """The contrast of pairs, or cross-entropy over classes."""
    z = adapted(p, batch["x"])
    y = batch["y"]
    u = affine(z, ctx.text)
    u = over(ctx.number("scale"), u) * u
    if ctx.hp["objective"] == "ce":
        return cross_entropy(u, y, batch["w"])
    # Column j of the pairs is the column of class y_j.
    columns = y.unsqueeze(-2).expand(*u.shape[:-1], y.shape[-1])
    return pair_contrast(u.gather(-1, columns), batch["w"])


def predict(down: Tree, _state: Tree, _data: ClientData, x: Tensor, ctx: Ctx) -> Tensor:
    """s z.T', [.., N, C]."""
    u = affine(adapted(down, x), ctx.text)
    return over(ctx.number("scale"), u) * u


def embed(down: Tree, _own: Tree, x: Tensor, _ctx: Ctx) -> Tensor:
    """Gated features of unit length, [.., N, D]."""
    return adapted(down, x)


METHOD = Method(
    name="fedclip",
    paper="Lu et al., IEEE Data Engineering Bulletin 2023",
    summary="Clients train a small attention network on CLIP's image features against class "
    "texts; the server averages it.",
    hparams=(
        UNIT_FEATURES,
        AGG,
        HParam(
            "objective",
            "contrastive",
            "choice",
            "contrastive: match the images and texts of a batch; ce: cross-entropy over classes",
            choices=("contrastive", "ce"),
        ),
        HParam("scale", 100.0, "float", "factor of the cosines", low=1e-6),
        *declare(without(TRAINING, "wd"), lr=5e-5, drop_last=False),
        HParam("wd", 0.0, "float", "L2 weight decay, added to the gradient", low=0.0, official=0.2),
        *with_official(ADAM, adam_beta2=0.98, adam_eps=1e-6),
    ),
    defaults=Defaults(rounds=200, participation=None, clients=4, scheme="feature-shift"),
    init=init,
    enter=keep_whole_optimiser,
    fit=local(loss, names, names, names),
    uploads=server_tensors(names),
    predict=predict,
    zero_shot=model.by_text,
    scores_new_classes=lambda _hp: True,
    embed=embed,
    needs=frozenset({"labels", "text"}),
    trainable=count_of(*NAMES),
    paper_count=lambda D, _classes, _clients, _hp: (2 * D * (D + 1), 2 * D * (D + 1)),
    uneven_rows="a row is contrasted with the texts of the other rows of its batch",
    page=MethodPage(
        family="With class texts",
        formula=r"""
            g(f) = \mathrm{softmax}\big(B \tanh(A f + a) + b\big),
                \qquad z = \frac{g(f) \odot f}{\lVert g(f) \odot f \rVert}, \qquad \ell = s\, z T^\top
        """,
        terms="""
            $f$: the unit feature of an image; $T$: the unit features of the class texts; $s$: the scale of the logits;
            $A$, $a$, $B$, $b$: the trained network.
        """,
        when="""
            Use it if the classes at test time may differ from those in training: the network does not depend on the
            classes.
        """,
        cite=("lu2023fedclip",),
    ),
)
