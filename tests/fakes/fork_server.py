"""A Python that starts at once: every call is a fork of a server that has imported torch and its like already.

The documentation has dozens of commands, and importing torch takes longer than what they do. serving(folder) makes
folder/python; what it runs has its own process, arguments, environment, folder and streams, as usual. Signals to the
caller do not reach it.
"""

import contextlib
import gc
import marshal
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

CLIENT = """#!{python} -SE
import _socket, marshal, os, sys  # socket and json take twice as long as the rest together
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
request = dict(argv=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ), executable=sys.argv[0])
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
server.sendmsg([marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
sys.exit(int(server.recv(16) or 1))
"""
REPORTS = ("argparse", "csv", "matplotlib.pyplot", "numpy", "pandas", "sqlite3", "statistics")
MODULES = (
    *REPORTS, "jinja2", "torch", "torch._dynamo", "torch._inductor.utils", "torch.distributed.fsdp",
    "torch.distributed.run", "torch.profiler", "torch.utils.benchmark", "triton",
)  # fmt: skip


@contextlib.contextmanager
def serving(folder, modules=MODULES):
    """Start a server that imports these modules. Yields the path of its Python; the server ends with the block."""
    address, executable = str(folder / "socket"), folder / "python"
    executable.write_text(CLIENT.format(python=sys.executable, address=address))
    executable.chmod(0o755)
    # The interpreter's decorators count at triton's import; programs that do not ask for it never launch a kernel.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    process = subprocess.Popen([sys.executable, __file__, address, *modules], env=environment)
    try:
        while not os.path.exists(address):
            assert process.poll() is None, "the server ended"
            time.sleep(0.05)
        yield str(executable)
    finally:
        process.kill()
        process.wait()


def execute(request):
    """Does what the command line asks for, in this process. Returns the exit code."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = request["executable"]  # subprocesses start fast as well
    sys.argv = request["argv"][request["argv"][0] == "-u" :]  # torchrun's, for streams that are not buffered
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if sys.argv[0] == "-c":
            code = sys.argv.pop(1)
            sys.path[0] = ""
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif sys.argv[0] == "-m":
            sys.path[0] = os.getcwd()
            name = sys.argv.pop(1)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return int(end.code) if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(address, *modules):
    for name in modules:
        with contextlib.suppress(ImportError):
            __import__(name)
    if "triton" in sys.modules:
        interpreter.quicken()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(16)
    os.rename(address + ".new", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        connection, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            code = execute(marshal.loads(message))
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.flush()
            sys.stderr.flush()
            connection.send(str(code).encode())
            os._exit(0)
        for stream in streams:
            os.close(stream)
        connection.close()


if __name__ == "__main__":
    import interpreter  # beside this file

    serve(*sys.argv[1:])
