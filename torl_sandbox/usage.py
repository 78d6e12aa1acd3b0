"""What a program uses in all its processes: the kernel's limits count each by itself, and control groups are not ours.

A slot looks through the server's /proc, which it opened before it covered it, so that its programs have none.
"""

import contextlib
import os
import resource


class Usage:
    def __init__(self, rlimits):
        self.slot = os.readlink("/proc/self")  # our number there is another than in our namespace
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self.most_memory, self.most_processes = rlimits["RLIMIT_AS"], rlimits["RLIMIT_NPROC"]

    def excess(self):
        """The status of a program that uses more in all than its limits, or None.

        A process was forked from the slot and shares its memory, so that much of each does not count. The kernel
        limits the number of processes, but not for root.
        """
        children, resident = {}, {}
        for name in os.listdir(self.proc):
            if name.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    parent, resident[name] = self.read(name)
                    children.setdefault(parent, []).append(name)
        processes = list(children.get(self.slot, ()))
        for name in processes:
            processes += children.get(name, ())
        if len(processes) > self.most_processes:
            return "killed"
        memory = sum(max(0, resident[name] - resident[self.slot]) for name in processes)
        return "memory" if memory * resource.getpagesize() > self.most_memory else None

    def read(self, name):
        """A process's parent and its pages in memory."""
        with open(os.open(f"{name}/stat", os.O_RDONLY, dir_fd=self.proc), "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        return fields[1].decode(), int(fields[21])
