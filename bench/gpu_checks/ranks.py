"""Checks that ranks on one GPU give the results of one process.

NCCL refuses two ranks of a host on one GPU. With its own `NCCL_HOSTID` each rank counts as a host, and the ranks
communicate through sockets."""

import os
import threading
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import numerics_table as numerics
import torch
from redline.runners.host.process import kill_tree

from . import Row, Setting

ORDERS = ("gpipe", "1f1b", "interleaved", "zero bubble", "zbv")
CELLS = ("tp2", "dp2", "zero1", "zero2", "zero3", *(f"pp2 {order}" for order in ORDERS), "sp2", "cp2")
TINY = ("tp2", "zero3", "cp2")
CELL_S = 60.0
"""Longest time of a cell, s."""


def ranks(setting: Setting) -> Iterator[Row]:
    """Two ranks with every way of sharding a model, in fp32 and bf16; a failing rank ends its pair."""
    due = [(cell, precision) for cell in (TINY if setting.tiny else CELLS) for precision in ("fp32", "bf16")]
    if setting.tiny:
        due = [each for each in due if each[1] == "fp32" or each[0] == "tp2"]
    while due:
        for row in _pair(setting, list(due)):
            due.pop(0)
            yield row


def _pair(setting: Setting, cells: list[tuple[str, str]]) -> Iterator[Row]:
    """Returns the rows of cells in order, run by two ranks, up to the first failure."""
    context = get_context("fork")
    store = setting.folder / "ranks.store"
    store.unlink(missing_ok=True)
    pipes, processes = [], []
    for rank in range(2):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(rank, setting.device, str(store), cells, sender))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        for cell, precision in cells:
            answers: list[Any] = []
            for pipe in pipes:
                try:
                    answers.append(pipe.recv() if pipe.poll(CELL_S) else f"no answer within {CELL_S:g} s")
                except EOFError:
                    answers.append("a rank ended")
            failure = next((each for each in answers if isinstance(each, str)), None)
            row: Row = {"what": f"{cell}, {precision}", "holds": failure is None}
            if failure is not None:
                yield {**row, "error": failure[-300:]}
                return
            wrong = next((each.wrong.description for each in answers if not each.holds), None)
            share = max(each.largest_of(kind).share for each in answers for kind in ("gradients", "weights"))
            yield {**row, "share": share, "wrong": wrong, "holds": wrong is None}
    finally:
        for process in processes:
            kill_tree(process.pid)
            process.join()


def _serve(rank: int, device: str, store: str, cells: list[tuple[str, str]], answers: Any) -> None:
    import torch.distributed as dist

    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(0)
            torch.zeros(1, device="cuda")
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
        for cell, precision in cells:
            config = {**numerics.COMBINATIONS[cell], "precision": precision}
            answers.send(numerics.departure(numerics.tiny("llama", cell), config))
    except Exception:
        answers.send(traceback.format_exc())
        return
    threading.Event().wait()  # the other rank may still be communicating
