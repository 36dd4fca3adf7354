"""A small file system of its own, mounted in a separate process, for tests of a full disk."""

import contextlib
import ctypes
import os
import pickle
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000


def on_small_disk(size, function, *args, ranks=1):
    """Returns the results of `function(folder, *args)`, where `folder` is on a file system of `size` bytes.

    The calls run in forked processes, which are ranks of a process group if there are several. Skips the test if this
    user cannot mount.
    """
    reads, writes = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(BaseException), os.fdopen(writes, "wb") as out:
            out.write(_answer(lambda: _mounted(size, function, args, ranks)))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answers:
        done, found = pickle.load(answers)
    os.wait()
    if done is None:
        pytest.skip(f"no file system can be mounted here: {found}")
    assert done, found
    return found


def fill(folder):
    """Writes a file until the disk is full."""
    with contextlib.suppress(OSError), open(Path(folder, "ballast"), "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def free(folder):
    """Removes that file."""
    Path(folder, "ballast").unlink()


def _answer(call):
    try:
        return pickle.dumps((True, call()))
    except _NoMount as error:
        return pickle.dumps((None, str(error)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


class _NoMount(Exception):
    pass


def _mounted(size, function, args, ranks):
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS):
        if libc.unshare(_NEW_MOUNTS | _NEW_USERS):
            raise _NoMount(os.strerror(ctypes.get_errno()))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as stores:
        private = 1 << 18 | 1 << 14  # recursive
        if libc.mount(None, b"/", None, private, None) or libc.mount(
            b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={size}".encode()
        ):
            raise _NoMount(os.strerror(ctypes.get_errno()))
        try:
            if ranks == 1:
                return function(folder, *args)
            return _ranks(ranks, stores, lambda: function(folder, *args))
        finally:
            libc.umount2(folder.encode(), 2)


def _ranks(count, stores, call):
    import torch.distributed as dist

    pipes = []
    for rank in range(count):
        reads, writes = os.pipe()
        if os.fork() == 0:
            with os.fdopen(writes, "wb") as out:

                def joined(rank=rank):
                    store = dist.FileStore(f"{stores}/store", count)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
                    return call()

                out.write(_answer(joined))
                out.flush()
                sys.stdout.flush()
                os._exit(0)
        os.close(writes)
        pipes.append(reads)
    found = []
    for reads in pipes:
        with os.fdopen(reads, "rb") as answers:
            done, value = pickle.load(answers)
        if not done:
            raise AssertionError(value)
        found.append(value)
    return found
