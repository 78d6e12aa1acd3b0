"""The fork server: imports the scientific packages once, then forks a ready-made child for every program.

It runs as a script in the sandbox that the embedded interpreter has started. Processes, from the outside in:

    server                warms up, forks the slots, ends with the trainer or its end of the control pipe
    └── slot (one a core) has the trainer's socket; in the namespace tiers the init process of its own pid namespace,
        │                 with /tmp and /dev/shm of its own
        └── program       forked and confined ahead of its call, waits for its code

A slot is confined less than a program, and never runs the model's code. When a program ends, for whatever reason, the
slot kills all that it started before it answers: everything else in its pid namespace. Where there is none, a program
cannot start another process. Each process is killed when the one above it ends. Slots and programs are the kernel's
first choice when memory runs out.

In tier `user` a program has the same user as its slot and the server, so they must not be in its reach: not visible,
not in its process group, and without handlers for signals, since the first process of a namespace gets no others.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import signal
import socket
import sys
from pathlib import Path

import confine
import program
from supervise import delete, supervise, wait_for
from usage import Usage

FOLDERS = ("/tmp", "/dev/shm")  # a slot's own, where there are namespaces
MADV_COLLAPSE = 25
HUGE_PAGE = 1 << 21
PRELOAD = ("numpy", "numpy.linalg", "sympy", "scipy", "collections", "decimal", "fractions", "itertools", "statistics")
# sympy imports and builds much at its first use; a call would pay for that every time. Other expressions than those
# of the benchmarks and tests, whose results must not come from sympy's cache.
WARM_UP = """
import sympy as sp, numpy as np
a, b = sp.symbols("a b")
for text in (
    sp.factor(a**4 - 16), sp.expand((a + b) ** 3), sp.simplify(sp.sin(a) ** 2 + sp.cos(a) ** 2),
    sp.solve(a**2 - 5 * a + 6, a), sp.solve([a + b - 3, a - b - 1], [a, b]), sp.integrate(a * sp.exp(a), a),
    sp.integrate(a**2, (a, 0, 1)), sp.diff(a**3 * sp.sin(a), a), sp.limit(sp.sin(a) / a, a, 0),
    sp.series(sp.cos(a), a, 0, 4), sp.summation(a, (a, 1, 10)), sp.Matrix([[1, 2], [3, 5]]).inv(),
    sp.factorint(5040), sp.isprime(7919), sp.divisors(60), sp.nsolve(a**2 - 2, 1), sp.Rational(3, 7) + sp.sqrt(8),
    sp.latex(a**2 / 3), sp.pretty(a**2 + 1 / b), sp.N(sp.pi, 30), sp.Eq(a, 3), sp.Poly(a**2 - 1, a).all_roots(),
):
    str(text)
str(np.linalg.det(np.array([[1.0, 2.0], [3.0, 5.0]]))), str(np.roots([1, -3, 2]))
np.linalg.solve(np.eye(2), np.ones(2))
"""


def warm_up():
    """Import and use the packages; returns the names of those that are not installed."""
    missing = []
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if not {"numpy", "sympy"} & set(missing):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(WARM_UP, {})
    atexit._clear()  # what the packages registered is not the program's
    gc.collect()
    gc.freeze()  # so that a collection in a child does not write to, and thus copy, all of this
    collapse_pages()
    return missing


def collapse_pages():
    """Put our memory on huge pages, of which a fork has to copy few entries: it takes about half the time then."""
    pieces = []
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _, _, inode, *_ = line.split()
            if inode == "0" and "w" in access and "stack" not in line:
                start, end = (int(address, 16) for address in span.split("-"))
                pieces += range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE)
    for piece in pieces:  # some are refused, and kernels before 6.1 have no such call
        confine.libc.madvise(ctypes.c_void_p(piece), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def reseed():
    """Forks must not share their random numbers."""
    random.seed()
    for name in ("numpy.random", "sympy.core.random"):
        if name in sys.modules:
            sys.modules[name].seed()


class Slot:
    """Runs one program at a time; `serve` ends with the trainer's socket."""

    def __init__(self, number, connection, settings):
        self.connection = connection
        self.requests = connection.makefile("rb")
        self.max_chars, self.file_mb = settings["max_output_chars"], settings["max_file_mb"]
        self.has_namespaces = settings["tier"] in ("root", "user")
        uid = None
        if os.getuid() == 0 and (settings["tier"] == "root" or is_open_to_all(settings["packages"])):
            uid = settings["first_uid"] + number
        rules = None
        self.usage = None  # in tier `none` a program has one process
        if self.has_namespaces:
            self.folder = "/tmp"
            self.usage = Usage(settings["rlimits"])
            confine.mount_private("/proc", 0)  # shows the server's processes
            self.untouched = {}
            for folder in FOLDERS:
                self.mount(folder)
        else:
            self.folder = os.path.join(settings["folder"], f"slot{number}")
            os.mkdir(self.folder, 0o700)
            if uid is not None:
                os.chown(self.folder, uid, uid)
            rules = confine.landlock_rules(settings["readable"], [self.folder, os.devnull])
        self.confinement = confine.Confinement(settings["rlimits"], uid=uid, rules=rules)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self):
        self.prepare()
        for request in self.requests:
            result = self.run(**json.loads(request))
            self.connection.sendall(json.dumps(result).encode() + b"\n")
            self.clean()
            self.prepare()
        self.end()

    def prepare(self):
        """Fork the next program's process; it confines itself and waits for its code."""
        code, self.code = os.pipe()
        (self.out, out), (self.err, err), (self.ready, ready) = os.pipe(), os.pipe(), os.pipe()
        self.child = os.fork()
        if self.child == 0:
            self.become_program(code, out, err, ready)
        for fd in (code, out, err, ready):
            os.close(fd)

    def become_program(self, code, out, err, ready):
        """In the new process. What goes wrong before the program has its code is a failure of ours."""
        try:
            os.setpgid(0, 0)  # a signal to its process group is for itself
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(self.folder)
            os.environ["HOME"] = os.environ["TMPDIR"] = os.environ["MPLCONFIGDIR"] = self.folder
            self.confinement.apply()
            reseed()
            os.write(ready, b"!")
            null = os.open(os.devnull, os.O_RDWR)  # a lock on ours would stay
            for fd, place in ((null, 0), (out, 1), (err, 2), (code, 3)):
                os.dup2(fd, place)
            os.closerange(4, 1 << 20)
        except BaseException as error:
            sys.stderr.write(f"cannot confine a program: {type(error).__name__}: {error}\n")
            os._exit(1)
        with open(3, "rb") as stream:
            source = stream.read()
        program.run(source)

    def run(self, code, timeout):
        """Give the waiting child its code and watch it."""
        is_ready = os.read(self.ready, 1)
        os.close(self.ready)
        if not is_ready:
            raise RuntimeError("a program's process ended before it was ready")
        with contextlib.suppress(BrokenPipeError), open(self.code, "wb") as stream:  # its reader may end at any time
            stream.write(code.encode())
        excess = self.usage and self.usage.excess
        result = supervise(self.child, self.out, self.err, timeout, self.max_chars, self.end, excess=excess)
        os.close(self.out)
        os.close(self.err)
        return result

    def end(self):
        """Kill the program and all that it started; returns its exit code."""
        os.kill(self.child, signal.SIGKILL)
        if self.has_namespaces:
            with contextlib.suppress(ProcessLookupError):  # nobody else is there
                os.kill(-1, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return code

    def mount(self, folder):
        confine.mount_private(folder, self.file_mb)
        self.untouched[folder] = state(folder)

    def clean(self):
        """An empty folder for the next program."""
        if self.has_namespaces:
            for folder in FOLDERS:
                if state(folder) != self.untouched[folder]:
                    confine.unmount(folder)
                    self.mount(folder)
        else:  # the folder itself stays: Landlock's rules hold for it, not for its name
            for entry in os.scandir(self.folder):
                if entry.is_dir(follow_symlinks=False):
                    delete(entry.path)
                else:
                    os.unlink(entry.path)


def state(folder):
    """Differs after any change to the folder: its entries, mode, times, attributes."""
    status = os.stat(folder)
    return status.st_ctime_ns, status.st_mtime_ns, status.st_mode, status.st_size


def is_open_to_all(packages):
    """Whether another user can read our Python: not if it is in the home of root."""
    folders = {parent for path in (sys.executable, os.__file__, *packages) for parent in Path(path).resolve().parents}
    return all(folder.stat().st_mode & 0o001 for folder in folders)


def start_slot(number, fd, settings):
    """Fork a slot with its socket `fd`; returns its process id, or that of one in between in the namespace tiers."""
    child = os.fork()
    if child:
        return child
    try:
        for other in (settings["control"], settings["trainer"], *settings["slots"]):
            if other != fd:
                with contextlib.suppress(OSError):  # closed already
                    os.close(other)
        if settings["tier"] in ("root", "user"):
            names = ("mount", "ipc", "pid") if settings["tier"] == "root" else ("user", "mount", "ipc", "pid")
            confine.enter_namespaces(names)
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
            init = os.fork()
            if init:
                os.waitpid(init, 0)
                os._exit(1)
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)  # a session of its own would be a scheduling group too, and cost a third of the speed
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
        Slot(number, socket.socket(fileno=fd), settings).serve()
    except BaseException as error:  # a forked process must not go on as the server
        sys.stderr.write(f"slot {number}: {type(error).__name__}: {error}\n")
    finally:
        os._exit(1)


def end_all(slots, folder, exit_code):
    """Kill the slots, and with them their programs; wait for the last process, delete what it left, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for slot in slots:
        with contextlib.suppress(ProcessLookupError):
            os.kill(slot, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # nobody is left
        while True:
            os.waitpid(-1, 0)
    if folder is not None:
        delete(folder)
    os._exit(exit_code)


def main():
    settings = json.loads(sys.argv[1])
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)] + settings["packages"]
    missing = warm_up()
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)  # to wait for programs whose slot is gone
    slots = []
    for number, fd in enumerate(settings["slots"]):
        slots.append(start_slot(number, fd, settings))
        os.close(fd)
    # A slot that is gone ends all: the trainer starts anew.
    signal.signal(signal.SIGCHLD, lambda *_: end_all(slots, settings["folder"], 1))
    os.write(settings["control"], json.dumps({"missing": missing}).encode() + b"\n")
    while not wait_for((settings["control"], settings["trainer"]), 3600.0):  # forks of the trainer hold the first too
        pass
    end_all(slots, settings["folder"], 0)


if __name__ == "__main__":
    main()
