"""Flower's SuperExec for a site, which starts each app as a fork of a process that has imported torch.

Flower starts a new process for every message, which imports torch and the app: two seconds of a processor. A fork
begins with both imported, and is as separate as a new process, because it contains nothing of other messages.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import run_clientapp

from fedcache.process import worker_context

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = (
    __name__,
    "fedcache.federate.engines.flower.client_app",
    "fedcache.federate.methods.fedavg",
    "fedcache.runs.loop",
)
"""Modules that the process imports before a message arrives."""


def run_app(spec: ExecutionSpec) -> None:
    """Answer one message, in a fork. The fork ends with the process that made it, which ends with the SuperExec."""
    # Forks start with SIGINT blocked. Flower ends an app with SIGINT, for example if the app's parent has ended.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = os.getppid()
    sys.argv = ["flwr-clientapp", "--parent-pid", str(parent)]  # as ``end_with_parent`` reads it
    certificates = validate_and_resolve_root_certificates(
        spec.root_certificates_path, spec.insecure
    )
    run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=certificates,
        parent_pid=parent,
        runtime_dependency_install=spec.runtime_dependency_install,
    )


class ForkExecutor(SubprocessExecutor):  # type: ignore[misc]  # linters do not have Flower
    """Starts the app of every message as a fork."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the app for one message."""
        FORKS.Process(target=run_app, args=(spec,)).start()
        return LaunchResult.accepted()


def main() -> None:
    """Run Flower's own command line ``flower-superexec`` with forks."""
    worker_context(*IMPORTED)  # starts the process that ``FORKS`` forks
    run_superexec.get_executor = lambda *_, **__: ForkExecutor()
    flower_superexec()
