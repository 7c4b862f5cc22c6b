"""A Ray cluster of two nodes on this machine, a command on it, and the loss of a node on the way.

python two_nodes.py FOLDER FILES COMMAND ...     the second node is killed when FOLDER holds FILES chunk files
"""

import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster


def main(folder, files, command):
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    try:
        lost = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        cluster.wait_for_nodes()
        run = subprocess.Popen([*command, "--ray-address", cluster.address])
        while (
            run.poll() is None
            and sum(1 for f in folder.rglob("c/*/0/*") if f.is_file() or f.is_dir()) < files
        ):
            time.sleep(0.005)
        if run.poll() is None:
            cluster.remove_node(lost, allow_graceful=False)
            print("lost a node", file=sys.stderr)
        return run.wait()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
