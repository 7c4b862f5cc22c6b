"""CCVR: FedAvg, and then a classifier that the server trains again on virtual features of all classes.

Clients train like FedAvg. In the last round they send mean and covariance of the projections of each class instead of
weights. The server draws virtual features from them and trains the classifier.

Luo et al., "No fear of heterogeneity: classifier calibration for federated learning with non-IID data", NeurIPS 2021.
FedAvg's rounds end before round ``calibrate_at``. In it, client k computes z = P(x) of its rows under the global model
and sends the count n_ck, the sum and the products of the z of each class. The server has, exactly (eqs 3 and 4),
    mu_c = sum_k n_ck mu_ck / N_c,
    Sigma_c = sum_k [(n_ck - 1) Sigma_ck + n_ck mu_ck mu_ck'] / (N_c - 1) - N_c mu_c mu_c' / (N_c - 1)
            = (sum of z z' over class c - N_c mu_c mu_c') / (N_c - 1),
draws M_c virtual features from N(mu_c, Sigma_c) for each class, and trains Q on them with cross-entropy, from FedAvg's
Q. P stays. With ``head=linear`` the z are the features, and W and b are trained. A class of one row has the covariance
within all classes (ours). A class without rows in the round has no virtual features. Later rounds calibrate again.

The paper itself could not be opened here. Its equations are those of two summaries, and M_c = 100 is the number that
one of them reports for CIFAR-10 (500 for CIFAR-100, 1,000 for CINIC-10; D-108). ``virtual_of=share`` has N_c / N of all
virtual features in class c, which the paper allows. No code of the authors was found. Code of others (smduan/Fed-CCVR)
trains ten epochs with the optimiser of the clients, as here, on 2,000 features of each class (D-109). Some code also
applies a ReLU and a square root to virtual features and to projections (Tukey's ladder of powers), which is not done
here (D-110).

Special cases: before ``calibrate_at`` it is ``fedavg``; in one round of all clients with ``head=linear``,
``init=zero`` and ``drop_last=false`` the result does not depend on the partition.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedcache.federate.methods.common import (
    AGG,
    CLASSIFIER,
    FEAT_POST,
    INIT,
    LOGIT_SCALE,
    MODEL,
    TRAINING,
    Batch,
    ClientData,
    Ctx,
    Defaults,
    Hp,
    HParam,
    Method,
    MethodPage,
    Pooling,
    Statistic,
    Tree,
    Uploads,
    UploadTensor,
    declare,
    local,
    model,
    select,
    server_tensors,
    train,
    without,
)
from fedcache.federate.methods.fedncm import add_up, class_sums, means
from fedcache.federate.methods.gh_ofl import class_covariances, class_grams
from fedcache.heads.linear import affine
from fedcache.heads.losses import cross_entropy
from fedcache.heads.projection import finish

weights = server_tensors(model.names)
train_locally = local(model.ce_loss, model.names, model.trained, model.names)


def calibrates(ctx: Ctx) -> bool:
    """Whether clients send statistics in this round, and not weights."""
    # ``calibrate_at`` is None only outside of runs: a run replaces None by its number of rounds.
    return ctx.hp["calibrate_at"] is None or ctx.round + 1 >= ctx.count("calibrate_at")


def classifier(hp: Hp) -> tuple[str, str]:
    """Names of the weights and the bias that the calibration trains."""
    if hp["head"] == "linear":
        return ("W", "b")
    return CLASSIFIER


def width_of(ctx: Ctx) -> int:
    """Numbers in a projection, or in a feature for a linear head."""
    if ctx.hp["head"] == "linear":
        return ctx.env.width
    return ctx.count("dim")


def fit(down: Tree, state: Tree, data: ClientData, ctx: Ctx) -> tuple[Tree, Tree]:
    """FedAvg's local training; in a calibration the sums and products of the projections of each class."""
    if not calibrates(ctx):
        return train_locally(down, state, data, ctx)
    C = ctx.env.classes

    def sums(block: ClientData) -> Tree:
        x, mask = block.full()
        weight = mask.double()
        z = model.embed(down, {}, x, ctx).double() * weight.unsqueeze(-1)
        total, count = class_sums(z, block, C, weight)
        products = class_grams(z, block.labels(), weight, C)
        return {"class_sum": total, "class_gram": products, "count": count}

    return state, add_up(data, ctx, ctx.env.width, sums)


def uploads(server: Tree, ctx: Ctx) -> Uploads:
    """The weights; in a calibration class_sum [C, P], class_gram [C, P (P + 1) / 2] and count [C] in float64."""
    if not calibrates(ctx):
        return weights(server, ctx)
    C = ctx.env.classes
    P = width_of(ctx)
    # The bound of a row of features is no bound of its projection.
    longest: float | None = math.inf
    if ctx.hp["head"] == "linear":
        longest = None
    elif ctx.hp["z_norm"] == "l2":
        longest = 1.0
    sums = Statistic("class sums", longest=longest)
    products = Statistic("class grams", longest=longest)
    return {
        "class_sum": UploadTensor((C, P), torch.float64, statistic=sums),
        "class_gram": UploadTensor((C, P * (P + 1) // 2), torch.float64, statistic=products),
        "count": UploadTensor((C,), torch.float64, counts_rows=True),
    }


def pool(hp: Hp) -> dict[str, Pooling]:
    """Weights are averaged by the ``agg`` switch, and statistics are added."""
    average: Pooling = "mean"
    if hp["agg"] == "uniform":
        average = "uniform"
    return {"": average, "class_": "sum", "count": "sum"}


def roots(covariances: Tensor, mean: Tensor) -> Tensor:
    """The symmetric square roots of covariances [C, P, P], which may be singular, of classes with means [C, P]."""
    values, vectors = torch.linalg.eigh(covariances)
    # A covariance is a difference of mean squares, whose rounding an eigenvalue of 0 has. The root would magnify it.
    mean_square = values.clamp(min=0.0).sum(-1) + (mean**2).sum(-1)
    rounding = mean.shape[-1] * torch.finfo(values.dtype).eps * mean_square
    real = values > rounding.unsqueeze(-1)
    scaled = vectors * (values * real).sqrt().unsqueeze(-2)
    made: Tensor = scaled @ vectors.mT
    return made


def numbers_of_features(count: Tensor, ctx: Ctx) -> list[int]:
    """M_c of every class, 0 for a class without rows; ``count`` [C] rows of each class."""
    each = ctx.count("virtual")
    if ctx.hp["virtual_of"] == "class":
        return [each * int(n > 0) for n in count.tolist()]
    present = int((count > 0).sum())
    shared = count * (each * present) / count.sum()
    # A rare class keeps at least one.
    return [max(round(n), int(n > 0)) for n in shared.tolist()]


def draw(up: Tree, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """M_c virtual features of each class: rows [N, P] in the run's dtype, and labels [N]."""
    mean = means(up["class_sum"], up["count"])
    root = roots(class_covariances(up, mean), mean)
    numbers = numbers_of_features(up["count"], ctx)
    noise = ctx.rng.normal("virtual", [sum(numbers)], mean.shape[-1]).double()
    parts = torch.split(noise, numbers)
    rows = [mean[c] + part @ root[c] for c, part in enumerate(parts)]
    classes = torch.arange(len(numbers), device=mean.device)
    labels = classes.repeat_interleave(torch.tensor(numbers, device=mean.device))
    return torch.cat(rows).to(ctx.env.dtype), labels


def loss(p: Tree, batch: Batch, _down: Tree, ctx: Ctx) -> Tensor:
    """Cross-entropy of the classifier on virtual features."""
    W, b = (p[name] for name in classifier(ctx.hp))
    u = finish(model.head_of(ctx.hp), affine(batch["x"], W, b))
    return cross_entropy(u, batch["y"], batch["w"])


def aggregate(server: Tree, up: Tree, ctx: Ctx) -> Tree:
    """The averaged model; in a calibration the model with the classifier that was trained on virtual features."""
    if not calibrates(ctx):
        return {**server, **up}
    x, y = draw(up, ctx)
    # The server trains on virtual features like a client: with one stored view, and without a broadcast ({}).
    rows = torch.arange(len(y), device=y.device)
    data = ClientData(x.unsqueeze(1), y, rows, (len(y),))
    names = classifier(ctx.hp)
    start = select(server, names)
    trained = train(start, names, ctx.count("cal_epochs"), loss, {}, data, ctx)
    return {**server, **select(trained, names)}


METHOD = Method(
    name="ccvr",
    paper="Luo et al., NeurIPS 2021",
    summary="FedAvg; then the server trains the classifier again on virtual features drawn from the Gaussian of each "
    "class.",
    hparams=(
        *declare(FEAT_POST, without(MODEL, "bn_mode"), LOGIT_SCALE, INIT, AGG),
        *without(TRAINING, "reset_opt"),
        HParam(
            "calibrate_at",
            None,
            "int",
            "first round in which clients send statistics and the server calibrates; earlier rounds are FedAvg's",
            low=1,
            auto="the last of the run",
        ),
        HParam("virtual", 100, "int", "virtual features of a class, or their mean number", low=1),
        HParam(
            "virtual_of",
            "class",
            "choice",
            "class: the same number for each class; share: in proportion to the rows of the class",
            choices=("class", "share"),
        ),
        HParam("cal_epochs", 10, "int", "epochs over the virtual features", low=0),
    ),
    defaults=Defaults(rounds=100, participation=None, clients=10, scheme="dirichlet"),
    init=model.init,
    fit=fit,
    uploads=uploads,
    pool=pool,
    aggregate=aggregate,
    predict=model.predict,
    embed=model.embed,
    check=model.check,
    zero_shot=model.zero_shot,
    paper_count=None,
    page=MethodPage(
        family="Many rounds, one model",
        formula=r"""
            \begin{aligned}
            &z_{cj} \sim \mathcal{N}(\mu_c, \Sigma_c), \qquad \mu_c = \frac{1}{N_c} \sum_k n_{ck}\, \mu_{ck} \\
            &\Sigma_c = \sum_k \frac{(n_{ck} - 1)\, \Sigma_{ck} + n_{ck}\, \mu_{ck} \mu_{ck}^\top}{N_c - 1}
                - \frac{N_c}{N_c - 1}\, \mu_c \mu_c^\top \\
            &Q \leftarrow \mathrm{arg}\min_{Q'} \sum_c \sum_{j \le M_c} \mathrm{CE}\big(Q'(z_{cj}),\, c\big)
            \end{aligned}
        """,
        terms=r"""
            $\mu_{ck}$, $\Sigma_{ck}$, $n_{ck}$: mean, covariance and number of the projections of class $c$ at client
            $k$; $\mu_c$, $\Sigma_c$, $N_c$: those of all clients; $z_{cj}$: a virtual feature; $M_c$: their number
            (`virtual`); $Q$: the classifier; $\mathrm{CE}$: cross-entropy.
        """,
        when="""
            Use it instead of `fedavg` if clients have few classes each. All clients should take part in the last round,
            whose tensors are listed below; in earlier rounds clients send weights.
        """,
        cite=("luo2021ccvr",),
    ),
)
