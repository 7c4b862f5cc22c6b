"""Gates on the sources: what no module may do, whoever wrote it."""

import socket

import pytest
from command import python


@pytest.mark.slow
def test_what_recognises_a_finished_extraction_imports_no_torch():
    modules = (
        "",
        ".cli",
        ".api",
        ".extract.backbones",
        ".extract.datasets",
        ".extract.images",
        ".store",
        ".config",
    )
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module('fedcache' + module)\n"
        "    for heavy in ('torch', 'timm', 'open_clip', 'torchvision', 'huggingface_hub', 'sklearn'):\n"
        "        assert heavy not in sys.modules, (module, heavy)\n"
    )
    python(code)


def test_no_test_reaches_another_machine(no_network):
    with socket.socket() as line, pytest.raises(OSError, match="unreachable"):
        line.connect(("192.0.2.1", 80))
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("example.invalid", 80)
    assert len(no_network) == 2
    no_network.clear()
