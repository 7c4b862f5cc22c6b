"""A Ray cluster of two nodes on this machine, a command on it, and the loss of a node on the way.

python two_nodes.py FOLDER FILES COMMAND ...     the second node is killed when FOLDER holds FILES chunk files
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster


def chunks(folder):
    """Files of chunks; os.walk leaves out folders that the command renames meanwhile."""
    return sum(len(names) for at, _, names in os.walk(folder) if "/c/" in at)


def main(folder, files, command):
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    try:
        lost = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        cluster.wait_for_nodes()
        run = subprocess.Popen([*command, "--ray-address", cluster.address])
        while run.poll() is None and chunks(folder) < files:
            time.sleep(0.005)
        if run.poll() is None:
            cluster.remove_node(lost, allow_graceful=False)
            print("lost a node", file=sys.stderr)
        return run.wait()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
