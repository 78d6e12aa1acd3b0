"""Sent to the kernel of a remote sandbox once, before calls of `ask`: our fork server there, as on our own machine."""

import os
import sys
import tempfile

server = globals().get("server")  # in debug mode a new sandbox is the old one


def start(files, limits):
    """Unpack our package (`files`: texts by their paths) and start its fork server; raises whatever prevents it."""
    global server, print_fields
    if server is not None:
        server.close()
    for name in [name for name in sys.modules if name.split(".")[0] in ("torl_interpreters", "torl_sandbox")]:
        del sys.modules[name]
    with tempfile.TemporaryDirectory(prefix="torl-") as folder:
        for path, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
            with open(os.path.join(folder, path), "w", encoding="utf-8") as file:
                file.write(text)
        sys.path.insert(0, folder)
        try:
            from torl_interpreters.self_test import check
            from torl_interpreters.server import ServerProcess
            from torl_interpreters.tiers import Tier
            from torl_sandbox.supervise import print_fields
        finally:
            sys.path.remove(folder)
        server = ServerProcess(Tier.NONE, 1, **limits)
    check(server)  # also that nothing needs the files any more


def ask(mark, code, timeout):
    """Run a program and print its result."""
    print_fields(mark, server.call(0, code, timeout))
