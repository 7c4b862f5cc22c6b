"""The partition schemes by name. One family, one file; ``federate/partition/partition.py`` is the public face."""

from fedcache.federate.partition.dirichlet import DIRICHLET, FLESD, LDA
from fedcache.federate.partition.domain_shift import FEATURE_LABEL_SHIFT, FEATURE_SHIFT, LABEL_SHIFT
from fedcache.federate.partition.few_shot import FEW_SHOT
from fedcache.federate.partition.iid_shards import IID, SHARDS
from fedcache.federate.partition.scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (FEATURE_SHIFT, LABEL_SHIFT, FEATURE_LABEL_SHIFT, SHARDS, LDA, FLESD, IID, FEW_SHOT, DIRICHLET)
}
