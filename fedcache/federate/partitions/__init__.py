"""The partition schemes by name. One family, one file; ``federate/partition.py`` is the public face."""

from fedcache.federate.partitions.dirichlet import DIRICHLET, FLESD, LDA
from fedcache.federate.partitions.even import IID, SHARDS
from fedcache.federate.partitions.fedpcl import FEATURE_LABEL_SHIFT, FEATURE_SHIFT, LABEL_SHIFT
from fedcache.federate.partitions.few_shot import FEW_SHOT
from fedcache.federate.partitions.scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        FEATURE_SHIFT,
        LABEL_SHIFT,
        FEATURE_LABEL_SHIFT,
        SHARDS,
        LDA,
        FLESD,
        IID,
        FEW_SHOT,
        DIRICHLET,
    )
}
