"""Shared code of the methods. Names that nearly all methods use can be imported from this package itself."""

from fedcache.federate.engine.client_data import ClientData as ClientData
from fedcache.federate.engine.context import Ctx as Ctx
from fedcache.federate.engine.context import is_zero as is_zero
from fedcache.federate.engine.context import over as over
from fedcache.federate.engine.hyperparameters import Hp as Hp
from fedcache.federate.engine.hyperparameters import HParam as HParam
from fedcache.federate.engine.local_training import Batch as Batch
from fedcache.federate.engine.method import Defaults as Defaults
from fedcache.federate.engine.method import Method as Method
from fedcache.federate.engine.method import MethodPage as MethodPage
from fedcache.federate.engine.method import Statistic as Statistic
from fedcache.federate.engine.method import Uploads as Uploads
from fedcache.federate.engine.method import UploadTensor as UploadTensor
from fedcache.federate.engine.method import sends_nothing as sends_nothing
from fedcache.federate.engine.method import server_tensors as server_tensors
from fedcache.heads.linear import Tree as Tree
from fedcache.heads.linear import affine as affine
from fedcache.heads.linear import select as select
