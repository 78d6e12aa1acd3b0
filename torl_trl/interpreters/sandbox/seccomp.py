"""A seccomp filter made by hand: system calls that no program of a model needs answer EPERM. x86-64 and arm64.

The filter is classic BPF: load the architecture and the call's number, compare, return. Names and numbers are the
kernel's (its tables of system calls); arm64 lacks some of the older calls. Only x86-64 has been run.
"""

import ctypes
import errno
import platform
import struct

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the argument's low half

NEW_NAMESPACES = 0x7E020000  # the CLONE_NEW* flags

# Denied everywhere: ways to other processes, to the kernel's rarely used parts, to namespaces, mounts and sockets, to
# memory that no limit counts (memfd), to objects that outlive their process (System V IPC, queues, keys), and to
# personality, which would turn address randomisation off. socketpair stays.
# name: (x86-64, arm64)
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "personality": (135, 92),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "socket": (41, 198),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
# Where there is no process namespace: no other process may be made, ...
FORKS = {"fork": (57, None), "vfork": (58, None), "setpriority": (141, 140), "ioprio_set": (251, 30)}
# ... and none may be reached: each of these takes a process id first, 0 or its own is allowed.
ON_A_PROCESS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
NO_SUCH_CALL = {"clone3": (435, 435)}  # its flags cannot be looked at; the C library then takes clone
CLONE = (56, 220)
CLONE_THREAD = 0x10000

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32_BIT = 0x40000000


class Unsupported(Exception):
    """The kernel or the processor has no such protection."""


def instruction(code, constant, if_true=0, if_false=0):
    return struct.pack("<HBBI", code, if_true, if_false, constant)


def build(own_pid=None):
    """The filter's bytes. With `own_pid`, also what is needed where there is no process namespace.

    A jump gives the number of instructions to skip when the comparison is true, and when it is false.
    """
    column, architecture = machine()
    program = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, architecture, 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
    ]
    if column == 0:  # the x32 calls are the same ones under other numbers
        program += [instruction(AT_LEAST, X32_BIT, 0, 1), instruction(RETURN, ERRNO | errno.ENOSYS)]

    def answer(table, code):
        for numbers in table.values():
            if numbers[column] is not None:
                program.extend([instruction(EQUAL, numbers[column], 0, 1), instruction(RETURN, ERRNO | code)])

    answer(NO_SUCH_CALL, errno.ENOSYS)
    answer(DENIED, errno.EPERM)
    if own_pid is not None:
        answer(FORKS, errno.EPERM)
        for numbers in ON_A_PROCESS.values():
            program += [
                instruction(EQUAL, numbers[column], 0, 5),
                instruction(LOAD, FIRST_ARGUMENT),
                instruction(EQUAL, 0, 2, 0),
                instruction(EQUAL, own_pid, 1, 0),
                instruction(RETURN, ERRNO | errno.EPERM),
                instruction(RETURN, ALLOW),
            ]
    forbidden = [instruction(ANY_BIT, NEW_NAMESPACES, 0, 1)]
    if own_pid is not None:
        forbidden = [instruction(ANY_BIT, NEW_NAMESPACES, 1, 0), instruction(ANY_BIT, CLONE_THREAD, 1, 0)]
    program += [
        instruction(EQUAL, CLONE[column], 0, 2 + len(forbidden)),
        instruction(LOAD, FIRST_ARGUMENT),
        *forbidden,
        instruction(RETURN, ERRNO | errno.EPERM),
        instruction(RETURN, ALLOW),
    ]
    return b"".join(program)


def machine():
    """This processor's column in the tables and its number in the kernel."""
    name = platform.machine()
    if name not in MACHINES:
        raise Unsupported(f"no seccomp filter for the processor {name!r}")
    return MACHINES[name]


class Program(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(libc, program):
    """Put the filter on this process, for good. Needs no_new_privs. Raises `Unsupported` where there is no seccomp."""
    fprog = Program(len(program) // 8, program)
    if libc.prctl(22, 2, ctypes.byref(fprog), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise Unsupported(f"the kernel refuses a seccomp filter (errno {ctypes.get_errno()})")
