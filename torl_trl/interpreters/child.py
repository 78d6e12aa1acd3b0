"""What runs in the child process of the embedded interpreter: set the limits, then run the program as `__main__`.

Arguments: the number of a file descriptor that gets one byte when the program starts, the folders of installed
packages (as in PATH), then limits like RLIMIT_CPU=11. The program comes on standard input, which is empty afterwards.
The limits are set here, in the child itself: `preexec_fn` is unsafe in a process with threads. Each call waits for the
start, so imports are few, and Python starts with -S: reading every .pth file takes twice as long as the rest. What
`site` gives to a program, packages and `exit`, is put in place here.
"""

import _sitebuiltins
import builtins
import os
import resource
import sys
import types


def main() -> None:
    with open(0, "rb", closefd=False) as stdin:
        code = stdin.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ready = int(sys.argv[1])
    sys.path += sys.argv[2].split(os.pathsep)
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")
    builtins.help = _sitebuiltins._Helper()
    for argument in sys.argv[3:]:
        name, _, value = argument.partition("=")
        set_limit(getattr(resource, name), int(value))
    module = types.ModuleType("__main__")  # a fresh namespace; what pickle and multiprocessing look for
    sys.modules["__main__"] = module
    sys.argv[:] = ["program.py"]
    os.write(ready, b"!")
    try:
        exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(error.__traceback__.tb_next)  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def set_limit(limit: int, value: int) -> None:
    """Set the soft and hard limit, never above the hard limit that we were given."""
    hard = resource.getrlimit(limit)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main()
