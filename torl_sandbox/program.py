"""Runs one program as `__main__` in this process, and ends the process: the same in every backend.

The rules: a last bare expression is not echoed (as in the paper), standard input is empty, text that is printed leaves
at once so that it survives a kill, a lone surrogate prints as its escape, and 1000 frames of recursion are the
program's own. As in Python, an integer of more than 4300 digits is not converted to text.

As a script it takes: the number of a descriptor that gets one byte when the program starts, folders of packages (as in
PATH, may be empty), then limits like RLIMIT_CPU=11; the program comes on standard input. Each call waits for the
start, so imports are few, and the embedded interpreter starts Python with -S: reading every .pth file takes twice as
long as the rest. What `site` gives to a program, packages and `exit`, is put in place here.
"""

import _sitebuiltins
import atexit
import builtins
import io
import os
import resource
import sys
import threading
import types

RECURSION_LIMIT = 1000


def run(code: bytes) -> None:
    """Run `code` and end the process with its exit code; never returns."""
    exit_code = 1
    try:
        exit_code = execute(code)
        threading._shutdown()  # waits for the program's threads, as Python does at its end
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the program closed or replaced it
                continue
        os._exit(exit_code)  # without tearing down every module that was imported


def execute(code: bytes) -> int:
    """Run `code` in a fresh `__main__` and return its exit code."""
    module = types.ModuleType("__main__")  # what pickle and multiprocessing look for
    sys.modules["__main__"] = module
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # missing with -S
    builtins.help = _sitebuiltins._Helper()
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for a script in this folder
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(fd, "w", closefd=False)  # unbuffered
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.setrecursionlimit(RECURSION_LIMIT + depth())
    try:
        exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:
        error = error.with_traceback(error.__traceback__.tb_next)  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def depth() -> int:
    """Frames on the stack below the caller, the caller included."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def set_limit(limit: int, value: int) -> None:
    """Set the soft and hard limit, never above the hard limit that we were given.

    SIGXCPU comes at the soft limit of CPU time; at the hard one, a process is killed as by anyone.
    """
    bounds = (value, value + 1 if limit == resource.RLIMIT_CPU else value)
    most = resource.getrlimit(limit)[1]
    resource.setrlimit(
        limit, bounds if most == resource.RLIM_INFINITY else tuple(min(bound, most) for bound in bounds)
    )


def main() -> None:
    with open(0, "rb", closefd=False) as stdin:
        code = stdin.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ready = int(sys.argv[1])
    sys.path += [folder for folder in sys.argv[2].split(os.pathsep) if folder]
    for argument in sys.argv[3:]:
        name, _, value = argument.partition("=")
        set_limit(getattr(resource, name), int(value))
    os.write(ready, b"!")
    run(code)


if __name__ == "__main__":
    main()
