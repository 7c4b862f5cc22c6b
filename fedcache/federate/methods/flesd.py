"""FLESD: the server averages the clients' similarities of public rows, and distils them into one student encoder.

Clients train image encoders without labels. Each client encodes the same public images, and the server averages the
similarities between these images over the clients. It then trains one student encoder to reproduce the averaged
similarities.

Shi et al., "Towards communication-efficient and privacy-preserving federated representation learning" (FLESD). Client 0
holds the public rows and does not train; all clients can read these rows. A round:
    client k: g_k from the broadcast w by SimCLR on its own rows (eq 3); R_k = unit g_k(public view 0)
    M_k = R_k R_k' (eq 4), M = mean_k exp(M_k / tau_T) (eqs 5, 6)
    student from w: min mean_i KL(q_i || p_i), p_ij = softmax_j(z_i . k_j / tau_S), q_ij = M_ij / sum_j M_ij (eqs 7-9)
    key encoder: th_k <- zeta th_k + (1 - zeta) th (eq 10); w <- student.
Clients send R_k, Np x d numbers, or the matrix M_k (``send=matrix``). Values that are missing in the paper's text are
those of the released README. The released code has augmentation by data set (D-91) and
one-directional contrast (D-30), with BatchNorm on each view by itself (D-92). It compares 128-d projections (D-32;
``sim_at=trunk`` for 512-d). It has a queue whose first batches of every epoch take no step (D-34: ``queue_warm``), with
own keys among the anchors (D-35). It leaves out short batches (D-93), computes keys by the BatchNorm statistics of
their batch (D-94) and after eq 10 (D-95), and keeps a row's own similarity in addition to its n % (D-96). It trains in
float16 with a scaled loss; ``amp`` uses bfloat16 without a scaled loss (D-97). Up to 4,096 public rows,
``anchors=auto`` takes all of them instead of a queue, which is exactly eqs 7 to 9. Clients of other backbones or trunks
keep their own encoder, because only similarities are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedcache.federate.methods.common import (
    ClientData,
    Ctx,
    Defaults,
    HParam,
    Method,
    MethodPage,
    Tree,
    Uploads,
    UploadTensor,
    declare,
    distillation,
    select,
    simclr,
)
from fedcache.federate.methods.common.live_images import ON_IMAGES
from fedcache.heads.simclr import Ensemble, kept


def init(ctx: Ctx) -> Tree:
    """The first student, and the last change of its similarities, 0."""
    return {**simclr.init(ctx), "drift": ctx.zeros()}


def enter(down: Tree, data: ClientData, ctx: Ctx) -> Tree:
    """Sums of the client's losses, and an encoder of its own if its trunk does not fit the student's."""
    losses = simclr.enter(down, data, ctx)
    # A smaller or larger trunk cannot start at the student's weights, so it is kept by the client. A ResNet has no
    # ``t.W``, and is the same on all clients.
    if "t.W" not in down or down["t.W"].shape[-2:] == (ctx.count("hidden"), ctx.env.width):
        return losses
    return {**simclr.init(ctx), **losses}


def broadcast(server: Tree, ctx: Ctx) -> Tree:
    """The student."""
    return select(server, simclr.names(ctx.hp))


train = simclr.fit_with(simclr.loss, send=True)


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """SimCLR from w, then R_k of the public rows [.., Np, d], or M_k [.., Np, Np]."""
    kept, encoder = train(down, state, data, ctx)
    public = ctx.public[:, 0]
    axes = (1,) * len(ctx.lead)
    R = distillation.unit(encoder, public.reshape(axes + tuple(public.shape)), ctx)
    if ctx.hp["send"] == "reps":
        return kept, {"R": R}
    return kept, {"M": R @ R.mT}


def uploads(_server: Tree, ctx: Ctx) -> Uploads:
    """R_k [Np, d] of the public rows, or M_k [Np, Np]."""
    Np = len(ctx.public)
    if ctx.hp["send"] != "reps":
        return {"M": UploadTensor((Np, Np), ctx.env.dtype)}
    encoder = simclr.encoder_of(ctx.hp)
    if ctx.hp["sim_at"] == "projection":
        d = encoder.proj
    else:
        d = encoder.width
    return {"R": UploadTensor((Np, d), ctx.env.dtype)}


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """Distil the ensemble; ``drift`` is the mean change of the student's own similarities of public rows."""
    share = ctx.scalar("sim_topk_percent") / 100.0
    own = bool(ctx.hp["sim_topk_own"])
    target = Ensemble(up.get("R"), up.get("M"), ctx.scalar("tau_T"), share, own=own)
    w = broadcast(server, ctx)
    student = distillation.distil(w, target, ctx)
    # The change is measured on 1,024 public rows, because the matrix of similarities grows with their square.
    few = ctx.public[:1024, 0]
    old = distillation.unit(w, few, ctx)
    new = distillation.unit(student, few, ctx)
    change = new @ new.mT - old @ old.mT
    return {**student, "drift": change.abs().mean()}


def sent(up: Tree, ctx: Ctx) -> int:
    """Np d numbers of R_k, or the upper triangle of M_k; if rows are sparse, each kept number of M_k and its place."""
    if "R" in up:
        return up["R"].numel()
    rows = up["M"].shape[-1]
    share = ctx.scalar("sim_topk_percent") / 100.0
    if share < 1.0:
        own = bool(ctx.hp["sim_topk_own"])
        # With ``sim_topk_own`` a row's similarity to itself is kept, but it is always 1, so it is not sent.
        return 2 * rows * (kept(rows, share, own=own) - own)
    return rows * (rows - 1) // 2


def diagnose(server: Tree, states: Mapping[int, Tree], *_: object) -> dict[str, float]:
    """How far the student's similarities moved in the last distillation, and the clients' training loss."""
    return {"similarity_drift": float(server["drift"]), **simclr.watch(server, states)}


METHOD = Method(
    name="flesd",
    paper="Shi et al., FLESD, 2022",
    summary="Averages the clients' similarities of public images and distils them into one "
    "encoder.",
    hparams=(
        ON_IMAGES,
        *declare(simclr.SIMCLR, epochs=100),
        HParam(
            "send",
            "reps",
            "choice",
            "what clients send of the public rows; reps: representations; matrix: similarities",
            ("reps", "matrix"),
        ),
        *distillation.DISTIL,
        *simclr.PROBE,
    ),
    defaults=Defaults(rounds=2, participation=None, clients=6, scheme="flesd"),
    init=init,
    enter=enter,
    broadcast=broadcast,
    fit=fit,
    uploads=uploads,
    pool=lambda _hp: {"": "stack"},
    aggregate=aggregate,
    predict=simclr.predict,
    embed=simclr.embed,
    deploy=simclr.probe,
    check=distillation.check,
    diagnose=diagnose,
    needs=frozenset({"pixels", "public"}),
    executions=("sequential",),
    sent=sent,
    received=simclr.parameters,
    trainable=simclr.trainable,
    fidelity=simclr.fidelity,
    paper_count=None,
    upload_descriptions={
        "R": (
            "representations of the public rows",
            "of public rows only, by a model made from its own",
        ),
    },
    page=MethodPage(
        family="Training the encoder itself",
        formula=r"""
            \begin{aligned}
            M &= \frac{1}{K} \sum_k \exp\big(R_k R_k^\top / \tau_T\big),
                \qquad q_{ij} = \frac{M_{ij}}{\sum_l M_{il}} \\
            L &= \frac{1}{B} \sum_i \mathrm{KL}(q_i \Vert p_i),
                \qquad p_{ij} = \mathrm{softmax}_j(z_i \cdot k_j / \tau_S)
            \end{aligned}
        """,
        terms=r"""
            $R_k$: the encodings of the public images by client $k$; $K$: the number of clients; $M$: their averaged
            similarities; $z$, $k$: the student and its slow copy at the server; $\tau_T$, $\tau_S$: temperatures; $B$:
            the batch.
        """,
        when="""
            Use it if clients have no labels and have different networks, and if all clients may see the public images.
        """,
        cite=("shi2022flesd",),
    ),
)
