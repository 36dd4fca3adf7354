"""What a training does, observed inside its own process: optimizer steps, backward passes, batches, memory, failures.

`sitecustomize` imports this file when the program imports torch. It imports nothing but the standard library, and only
uses modules of torch that the program itself has imported. Every process of the command writes one file of JSON lines
into the folder of the environment variable REDLINE_OBSERVE; `runners/command/observation.py` reads them.

Nothing here may change the program: no random numbers are drawn, no device is synchronised, nothing is printed. If the
observer itself fails, it writes the reason into its file and observes nothing further.

Times are s of the machine's monotonic clock, which all processes share. A step is a group of optimizer steps without a
backward pass in between: several optimizers, and the sub-groups of ZeRO, are one.
"""

import atexit
import functools
import os
import sys
import threading
import time
import weakref
import zlib

FIELDS = (
    "end",  # end of its last optimizer step
    "steps",  # number of steps that the row stands for
    "optimizers",  # which optimizers stepped, by number, as text
    "samples",  # in the batches of the loaders that led to a backward pass
    "tokens",
    "batches",
    "backwards",
    "loss",  # sum over the backward passes, on a CPU
    "forward",  # from here on: wall time of its parts, s
    "backward",
    "optimizer",
    "data",
    "evaluation",
    "saving",
    "other",
    "compiling",  # part of the others
)
"""Columns of a step's row."""
PARTS = ("forward", "backward", "optimizer", "data", "evaluation", "saving", "other")
FLUSH_S = 0.3
"""Shortest time between two lines of steps, s."""
SHORT_S = 0.005
"""Steps are joined into rows of at least this time, s, so that fast ones do not fill the disk."""
MOST_NODES = 4000
"""Nodes of the autograd graph that are looked at, once, for the formats of its matrix products."""
FINGERPRINTS = 4
"""Batches of each loader whose values are compared between ranks."""
MOST_LEAVES = 12
"""Tensors of a batch that are looked at."""
TOKEN_NAMES = ("input_ids", "tokens", "input", "text", "decoder_input_ids")
"""Keys of a batch under which trainers hold token ids."""
PRODUCTS = (
    "AddmmBackward",
    "MmBackward",
    "BmmBackward",
    "BaddbmmBackward",
    "Linear",
    "Convolution",
    "ScaledDotProduct",
)
"""Parts of the names of autograd's nodes that are matrix products or convolutions."""

_clock = time.monotonic


class _Loader:
    """One iterator of a DataLoader."""

    __slots__ = ("batches", "buffered", "fingerprints", "indices", "replicas", "samples", "source", "tokens", "trains")

    def __init__(self, iterator):
        self.source = id(getattr(iterator, "_dataset", None))
        self.indices = []  # numbers of samples that were requested and not delivered yet
        self.batches, self.samples, self.tokens = 0, 0, 0  # since the last step
        self.trains = False  # a backward pass followed its latest batch since the last step
        self.fingerprints = []
        self.buffered = getattr(iterator, "_num_workers", 0) * (getattr(iterator, "_prefetch_factor", 0) or 0)
        self.replicas = _replicas(iterator)


class _Process:
    """What this process has done. A forked child has its own."""

    def __init__(self):
        self.file = None
        self.rows = []
        self.written = 0.0
        self.dirty = True  # facts have changed since they were written
        self.begun = _clock()
        self.last = self.closed = self.begun  # ends of the last event, and of the last step
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.compiling, self.compiling_since = 0.0, None
        self.backwards, self.backwards_ever, self.depth = 0, 0, 0
        self.loss = None
        self.in_optimizer, self.inside = 0.0, 0.0  # begin of the optimizer's step; its time inside a backward pass
        self.pending = None  # the row of a step to which further optimizers may belong
        self.stepped = set()  # optimizers of `pending`
        self.loaders = weakref.WeakKeyDictionary()
        self.active = None  # the loader of the latest batch
        self.sources = set()  # data sets of which a backward pass has followed
        self.fingerprints, self.replicas, self.buffered = [], None, 0  # of the loaders that led to one
        self.waiting = 0  # depth of calls of loaders
        self.evaluation = None  # begin of an evaluation, and the parts at that time
        self.optimizers, self.names = {}, []
        self.trained, self.autocast, self.products = {}, set(), {}
        self.compilations = 0
        self.raised = None
        self.memory = {}


_process = _Process()
_failed = False
_torch = None


def guarded(function, *arguments):
    """Calls a function of the observer. A failure ends the observation and never reaches the program."""
    global _failed
    if _failed:
        return
    try:
        function(*arguments)
    except Exception as error:  # whatever it is, the program must run as it would without the observer
        _failed = True
        try:
            _write({"fault": type(error).__name__ + ": " + str(error)})
        except Exception:  # the file cannot be written either: then nothing is observed, which redline says
            _failed = True


def observe_backward(autograd):
    """Observes calls of `torch.autograd.backward`, which `Tensor.backward` calls as well."""
    global _torch
    _torch = sys.modules["torch"]
    backward = autograd.backward

    @functools.wraps(backward)
    def observed(tensors, *arguments, **options):
        guarded(_backward_begins, tensors)
        begin = _clock()
        try:
            return backward(tensors, *arguments, **options)
        finally:
            guarded(_backward_ends, begin)

    autograd.backward = observed
    _write({"imported": "torch"})  # a training may follow
    _watch_exceptions()
    atexit.register(guarded, _at_exit)
    os.register_at_fork(after_in_child=_after_fork)


def observe_optimizers(module):
    """Observes the steps of all optimizers, by torch's global hooks."""

    def begins(optimizer, arguments, options):
        if not _torch.compiler.is_compiling():  # a compiled step is traced: it must not contain the observer
            guarded(_optimizer_begins, optimizer)

    def ends(optimizer, arguments, options):
        if not _torch.compiler.is_compiling():
            guarded(_optimizer_ends, optimizer)

    module.register_optimizer_step_pre_hook(begins)
    module.register_optimizer_step_post_hook(ends)


def observe_loaders(module):
    """Observes the batches that leave any DataLoader. torch has no hook for them."""
    iterator = module._BaseDataLoaderIter
    following, indices = iterator.__next__, iterator._next_index

    @functools.wraps(following)
    def observed(self):
        begin = _clock()
        guarded(_batch_begins, self, begin)
        batch = None
        try:
            batch = following(self)
            return batch
        finally:
            guarded(_batch_ends, self, begin, batch)

    @functools.wraps(indices)
    def observed_indices(self):
        index = indices(self)
        guarded(_index_taken, self, index)
        return index

    iterator.__next__, iterator._next_index = observed, observed_indices


def observe_evaluation(module):
    """Observes `Module.eval()`, and the `train()` that follows it."""
    evaluate, train = module.Module.eval, module.Module.train

    @functools.wraps(train)
    def observed_train(self, mode=True):
        if mode and module.Module.train is observed_train:
            module.Module.train = train  # observed only while an evaluation runs, as it is called for every module
            guarded(_evaluation_ends)
        return train(self, mode)

    @functools.wraps(evaluate)
    def observed_eval(self):
        evaluated = evaluate(self)
        guarded(_evaluation_begins)
        if not _failed and module.Module.train is train:  # not a function that the program has put there
            module.Module.train = observed_train
        return evaluated

    module.Module.eval = observed_eval


def observe_autocast(module):
    """Observes which formats autocast is entered with."""
    enter = module.autocast.__enter__

    @functools.wraps(enter)
    def observed(self):
        if not _torch_scripting():
            guarded(_autocast_entered, self)
        return enter(self)

    module.autocast.__enter__ = observed


def observe_saving(module):
    """Observes the time of saving, by the functions of `module` that do it."""
    for name in ("save", "save_file", "async_save"):
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, _saving(function))


def observe_compilation(module):
    """Observes the time of torch.compile."""
    module.callback_handler.register_start_callback(lambda *_: guarded(_compilation_begins))
    module.callback_handler.register_end_callback(lambda *_: guarded(_compilation_ends))


# -- what happens ------------------------------------------------------------------------------------------------------


def _account(part, now):
    """Adds the time since the last event to a part of the step."""
    _process.parts[part] += now - _process.last
    _process.last = now


def _backward_begins(tensors):
    process, now = _process, _clock()
    process.depth += 1
    if process.depth > 1:  # called inside another one, as by reentrant activation checkpointing
        return
    _evaluation_ends(void=True)
    if not process.optimizers and process.backwards:
        _gather(process.last)  # no optimizer has been seen: one that is compiled will not be, so that passes count
    _account("forward", now)
    _close()
    process.backwards += 1
    process.backwards_ever += 1
    process.inside = 0.0
    if process.active is not None:
        _trains(process.active)
    if process.backwards_ever == 2:
        _look_at_graph(tensors)
        process.dirty = True
    _note_loss(tensors)
    process.last = _clock()


def _trains(loader):
    """Notes that a backward pass has followed a batch of this loader."""
    process = _process
    loader.trains = True
    process.sources.add(loader.source)
    new = loader.fingerprints[len(process.fingerprints) :]
    if new or loader.replicas != process.replicas:
        process.fingerprints += new
        process.replicas = loader.replicas or process.replicas
        process.buffered = max(loader.buffered, process.buffered)
        process.dirty = True


def _backward_ends(begin):
    process = _process
    process.depth -= 1
    if process.depth > 0:
        return
    now = _clock()
    # Steps of optimizers inside the backward pass are the optimizers' time.
    process.parts["backward"] += max(0.0, now - begin - process.inside)
    process.last = now


def _optimizer_begins(optimizer):
    process, now = _process, _clock()
    if process.depth == 0:
        _account("other", now)
    if (
        process.backwards_ever == 0
        and process.pending is not None
        and (id(optimizer) in process.stepped or any(loader.batches for loader in process.loaders.values()))
    ):
        _close()  # passes that cannot be seen: a new batch, or the same optimizer, means a new step
    process.in_optimizer = now


def _optimizer_ends(optimizer):
    process, now = _process, _clock()
    if process.depth > 0:  # inside a backward pass
        process.parts["optimizer"] += now - process.in_optimizer
        process.inside += now - process.in_optimizer
        process.last = now
    else:
        _account("optimizer", now)  # what follows the passes of its closure, if it has one
    if id(optimizer) not in process.optimizers:
        _new_optimizer(optimizer)
    process.stepped.add(id(optimizer))
    _gather(now)


def _gather(now):
    """Adds what has happened since the last optimizer step to the pending step."""
    process = _process
    row = process.pending
    if row is None:
        row = process.pending = dict.fromkeys(FIELDS, 0)
        row["loss"] = None
    row["end"], row["steps"] = now, 1
    for loader in list(process.loaders.values()):
        if loader.trains:
            row["samples"] += loader.samples
            row["tokens"] += loader.tokens
            row["batches"] += loader.batches
        loader.samples = loader.tokens = loader.batches = 0
        loader.trains = False
    row["backwards"] += process.backwards
    if process.loss is not None:
        row["loss"] = (row["loss"] or 0.0) + process.loss
    for part in PARTS:
        row[part] += process.parts[part]
        process.parts[part] = 0.0
    row["compiling"] += process.compiling
    process.compiling, process.backwards, process.loss = 0.0, 0, None


def _close():
    """Ends the pending step, and writes what is due."""
    process = _process
    row, process.pending = process.pending, None
    if row is None:
        return
    row["optimizers"] = ",".join(sorted(str(process.optimizers[number]) for number in process.stepped))
    process.stepped = set()
    previous = process.rows[-1] if process.rows else None
    row["seconds"], process.closed = row["end"] - process.closed, row["end"]
    if previous is not None and previous["optimizers"] == row["optimizers"] and previous["seconds"] < SHORT_S:
        row["seconds"] += previous["seconds"]
        for name in FIELDS[1:]:
            if name not in ("optimizers", "loss"):
                row[name] += previous[name]
        process.rows[-1] = row
    else:
        process.rows.append(row)
    if row["end"] - process.written >= FLUSH_S:
        _flush(row["end"])


def _new_optimizer(optimizer):
    process = _process
    process.optimizers[id(optimizer)] = len(process.optimizers)
    process.names.append(type(optimizer).__name__)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                name = str(parameter.dtype).replace("torch.", "")
                process.trained[name] = process.trained.get(name, 0) + parameter.numel()
    process.dirty = True


def _batch_begins(iterator, now):
    process = _process
    process.waiting += 1
    if process.waiting > 1:
        return
    loader = _loader(iterator)
    if loader.source in process.sources:
        _evaluation_ends()
    elif process.sources and process.evaluation is None:
        _evaluation_begins()
    if process.depth == 0:
        _account("other", now)


def _batch_ends(iterator, begin, batch):
    process, now = _process, _clock()
    process.waiting -= 1
    loader = _loader(iterator)
    process.active = loader
    if process.waiting == 0 and process.depth == 0:
        process.parts["data"] += now - begin
        process.last = now
    if batch is None:
        return
    indices = loader.indices.pop(0) if loader.indices else None
    leading, tokens, leaf = _describe(batch)
    loader.batches += 1
    loader.samples += indices or leading or 0
    loader.tokens += tokens or 0
    if len(loader.fingerprints) < FINGERPRINTS:
        loader.fingerprints.append(_fingerprint(leaf))


def _index_taken(iterator, index):
    # Samples of a data set that is only iterated are not numbered: the batch itself shows how many there are.
    numbered = getattr(iterator, "_auto_collation", False) and getattr(iterator, "_dataset_kind", 1) == 0
    _loader(iterator).indices.append(len(index) if numbered and hasattr(index, "__len__") else None)


def _loader(iterator):
    process = _process
    loader = process.loaders.get(iterator)
    if loader is None:
        loader = process.loaders[iterator] = _Loader(iterator)
    return loader


def _evaluation_begins():
    process = _process
    if process.evaluation is None:
        now = _clock()
        if process.waiting == 0 and process.depth == 0:
            _account("other", now)
        process.evaluation = (now, dict(process.parts))


def _evaluation_ends(void=False):
    """Ends an evaluation. It was none if a backward pass comes before `train()` or a batch to train on (`void`)."""
    process = _process
    if process.evaluation is None:
        return
    (begin, before), process.evaluation = process.evaluation, None
    if void:
        return
    now = _clock()
    process.parts = before
    process.parts["evaluation"] += now - begin
    process.last = now


def _autocast_entered(autocast):
    if getattr(autocast, "_enabled", False):
        name = str(autocast.fast_dtype).replace("torch.", "")
        if name not in _process.autocast:
            _process.autocast.add(name)
            _process.dirty = True


def _torch_scripting():
    return _torch is None or _torch.jit.is_scripting()


def _saving(function):
    @functools.wraps(function)
    def observed(*arguments, **options):
        begin = _clock()
        try:
            return function(*arguments, **options)
        finally:
            guarded(_saved, begin)

    return observed


def _saved(begin):
    process = _process
    if process.evaluation is not None or begin < process.last:  # part of an evaluation, or of a save that saves
        return
    now = _clock()
    _account("other", begin)
    process.parts["saving"] += now - begin
    process.last = now


def _compilation_begins():
    _process.compiling_since = _clock()
    _process.compilations += 1
    _process.dirty = True
    _write({"compiling": True})


def _compilation_ends():
    process = _process
    if process.compiling_since is not None:
        process.compiling += _clock() - process.compiling_since
        process.compiling_since = None
        _write({"compiling": False})


# -- looking at tensors ------------------------------------------------------------------------------------------------


def _describe(batch):
    """Returns the leading dimension that most tensors of a batch share, its tokens (None if it has none), and its first
    tensor.
    """
    leaves, tokens = [], None
    pending = [("", batch, 0)]
    while pending and len(leaves) < MOST_LEAVES:
        name, value, depth = pending.pop(0)
        if isinstance(value, _torch.Tensor):
            if value.dim() > 0:
                leaves.append(value)
                if tokens is None and name in TOKEN_NAMES:
                    tokens = value.numel()
        elif depth < 4 and hasattr(value, "items") and hasattr(value, "keys"):
            pending += [(str(key), part, depth + 1) for key, part in value.items()]
        elif depth < 4 and isinstance(value, (list, tuple)):
            pending += [(name, part, depth + 1) for part in value[:MOST_LEAVES]]
        elif depth < 4 and hasattr(value, "__dict__"):
            pending += [(key, part, depth + 1) for key, part in vars(value).items()]
    if not leaves:
        return None, None, None
    sizes = [leaf.shape[0] for leaf in leaves]
    first = leaves[0]
    if tokens is None and first.dim() == 2 and not first.is_floating_point() and first.dtype != _torch.bool:
        tokens = first.numel()
    return max(set(sizes), key=sizes.count), tokens, first


def _fingerprint(leaf):
    """A number that differs between batches with other values; None for values on a device."""
    if leaf is None or leaf.device.type != "cpu" or leaf.numel() == 0 or leaf.layout is not _torch.strided:
        return None
    flat = leaf.detach().reshape(-1) if leaf.is_contiguous() else leaf.detach().flatten()
    return zlib.crc32(repr(flat[:: max(1, flat.numel() // 64)].tolist()).encode())


def _note_loss(tensors):
    loss = tensors if isinstance(tensors, _torch.Tensor) else tensors[0] if len(tensors) == 1 else None
    # Reading a value on a device would wait for it.
    if loss is not None and loss.numel() == 1 and loss.device.type == "cpu" and type(loss) is _torch.Tensor:
        _process.loss = (_process.loss or 0.0) + float(loss.detach())


def _look_at_graph(tensors):
    """Counts the formats of matrix products by the gradients that autograd's nodes take. Nothing is unpacked."""
    roots = [tensors] if isinstance(tensors, _torch.Tensor) else list(tensors)
    nodes = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen = set()
    products = {}
    while nodes and len(seen) < MOST_NODES:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if any(part in node.name() for part in PRODUCTS):
            for metadata in getattr(node, "_input_metadata", ())[:1]:
                name = str(metadata.dtype).replace("torch.", "")
                products[name] = products.get(name, 0) + 1
        nodes += [following for following, _ in node.next_functions if following is not None]
    _process.products = products


def _replicas(iterator):
    """Number of replicas that share the data, as its sampler knows it; None if it has none that says so."""
    sampler = getattr(iterator, "_index_sampler", None)
    for owner in (
        sampler,
        getattr(sampler, "sampler", None),
        getattr(sampler, "batch_sampler", None),
        getattr(iterator, "_dataset", None),
    ):
        for name in ("num_replicas", "data_parallel_size", "num_processes"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


# -- failures ----------------------------------------------------------------------------------------------------------


def _watch_exceptions():
    """Records the exception that ends the process, or one of its threads, at once."""
    previous, previous_of_threads = sys.excepthook, threading.excepthook

    def hook(kind, error, traceback):
        guarded(_raised, error, "process")
        previous(kind, error, traceback)

    def hook_of_threads(arguments):
        guarded(_raised, arguments.exc_value, "thread")
        previous_of_threads(arguments)

    sys.excepthook, threading.excepthook = hook, hook_of_threads


def _raised(error, where):
    if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)) or _process.raised == id(error):
        return
    _process.raised = id(error)  # not the exception itself, whose frames hold tensors
    kinds, current = [], error
    while current is not None and len(kinds) < 8:
        kinds += [kind.__name__ for kind in type(current).__mro__ if kind not in (object, BaseException, Exception)]
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    try:
        message = str(error)
    except Exception as failed:  # its own text may fail
        message = "(its message cannot be printed: " + type(failed).__name__ + ")"
    _write({"exception": {"type": type(error).__name__, "kinds": kinds, "message": message[:4000], "in": where}})


# -- writing -----------------------------------------------------------------------------------------------------------


def _flush(now):
    process = _process
    if not process.rows and process.file is None:
        return
    _look_at_memory()
    if process.dirty:
        process.dirty = False
        _write({"facts": _facts()})
    rows, process.rows = process.rows, []
    if rows:
        # Short times are written to the microsecond.
        _write({"steps": [[round(v, 6) if isinstance(v, float) else v for v in map(row.get, FIELDS)] for row in rows]})
    process.written = now


def _facts():
    process = _process
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    return {
        "fields": FIELDS,
        "pid": os.getpid(),
        "began": process.begun,
        "rank": int(rank) if rank is not None else None,
        "world": int(world) if world is not None else None,
        "torch": str(_torch.__version__),
        "optimizers": process.names,
        "trained": process.trained,
        "autocast": sorted(process.autocast),
        "products": process.products,
        "compiled": process.compilations,
        "backwards_seen": process.backwards_ever > 0,
        "fingerprints": process.fingerprints,
        "replicas": process.replicas,
        "buffered": process.buffered,
        "memory": process.memory,
    }


def _look_at_memory():
    """Updates the peaks of this process and its devices, MiB."""
    memory = dict(_process.memory)
    # The kernel's high-water mark is that of this program; getrusage's includes what it was forked from.
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM:"):
                resident = int(line.split()[1]) / 1024
                if resident > 1.005 * memory.get("resident", 0.0):  # not a line for every page
                    memory["resident"] = resident
                break
    cuda = getattr(_torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        for number in range(cuda.device_count()):
            stats = cuda.memory_stats(number)
            if not stats.get("reserved_bytes.all.peak"):
                continue
            free, total = cuda.mem_get_info(number)
            now = {
                "allocated": stats["allocated_bytes.all.peak"] / 2**20,
                "reserved": stats["reserved_bytes.all.peak"] / 2**20,
                "used": (total - free) / 2**20,
                "retries": stats["num_alloc_retries"],
            }
            before = memory.get(str(number), {})
            memory[str(number)] = {name: max(value, before.get(name, 0)) for name, value in now.items()}
    if memory != _process.memory:
        _process.memory = memory
        _process.dirty = True


def _write(line):
    import json

    process = _process
    if process.file is None:
        folder = os.environ["REDLINE_OBSERVE"]
        os.makedirs(folder, exist_ok=True)
        name = f"{os.getpid()}-{int(process.begun * 1e6)}.jsonl"
        process.file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _watch_child()
    os.write(process.file, (json.dumps(line) + "\n").encode())


def _watch_child():
    """Makes a child of multiprocessing, which ends without `atexit`, write its last steps and its exception."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, lambda: guarded(_child_ends), exitpriority=0)


def _child_ends():
    _raised(sys.exc_info()[1], "process")
    _at_exit()


def _at_exit():
    # Set by the interpreter also where the program has replaced `sys.excepthook`.
    _raised(getattr(sys, "last_value", None), "process")
    _close()
    _flush(_clock())


def _after_fork():
    """A forked child, such as a worker of a DataLoader, observes itself."""
    global _process
    file, _process = _process.file, _Process()
    if file is not None:
        os.close(file)
