"""Records the events of a training, which hooks in its process report, by step, and writes them as lines of JSON.

Every process of the command writes one file into the folder of the environment variable REDLINE_OBSERVE;
`runners/command/observation.py` reads them. Times are s of the machine's monotonic clock, which all processes share. A step is a
group of optimizer steps without a backward pass in between: several optimizers, and the sub-groups of ZeRO, are one.
"""

import collections
import math
import os
import sys
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
SUMMED = tuple(name for name in FIELDS if name not in ("end", "optimizers", "loss"))
PARTS = ("forward", "backward", "optimizer", "data", "evaluation", "saving", "other")
FLUSH_S = 0.3
"""Shortest time between two lines of steps, s."""
SHORT_S = 0.005
"""Steps are joined into rows of at least this time, s, so that fast ones do not fill the disk."""
MOST_NODES = 4000
"""Nodes of the autograd graph that are looked at for its matrix products."""
ROWS = 16
"""Backward passes of which the rows of their last product are noted."""
FINGERPRINTS = 4
"""Batches of each loader whose values are compared between ranks."""
SIZES = 16
"""Different sizes of batches and of steps that are counted: the usual one is among them."""
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

    __slots__ = (
        "batches",
        "buffered",
        "elements",
        "fingerprints",
        "indices",
        "replicas",
        "samples",
        "sizes",
        "source",
        "tokens",
        "trains",
    )

    def __init__(self, iterator):
        self.source = id(getattr(iterator, "_dataset", None))
        self.indices = []  # numbers of samples that were requested and not delivered yet
        self.batches, self.samples, self.tokens = 0, 0, 0  # since the last step
        self.sizes = []  # samples of each of these batches
        self.trains = False  # a backward pass followed its latest batch since the last step
        self.fingerprints = []
        self.elements = []  # of a sample's largest tensor, in the same batches
        self.buffered = getattr(iterator, "_num_workers", 0) * (getattr(iterator, "_prefetch_factor", 0) or 0)
        self.replicas = _replicas(iterator)


class Record:
    """The events of this process so far.

    Args:
        guarded: calls a method of this record, so that its failure does not reach the program.
    """

    def __init__(self, guarded):
        self.guarded = guarded
        self.torch = sys.modules["torch"]
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
        self.fingerprints, self.elements = [], []  # of the loaders that led to one; so are the following
        self.replicas, self.buffered = None, 0
        self.waiting = 0  # depth of calls of loaders
        self.batch_sizes, self.step_sizes = {}, {}  # how many batches and steps had so many samples
        self.evaluation = None  # begin of an evaluation, and the parts at that time
        self.optimizers, self.names = {}, []
        self.trained, self.autocast, self.products = {}, set(), {}
        self.product_rows = []  # of some backward passes
        self.compilations = 0
        self.ended_by = None  # number of the exception that has been written
        self.memory = {}

    def _account(self, part, now):
        """Adds the time since the last event to a part of the step."""
        self.parts[part] += now - self.last
        self.last = now

    def backward_begins(self, tensors):
        now = _clock()
        self.depth += 1
        if self.depth > 1:  # called inside another one, as by reentrant activation checkpointing
            return
        self.evaluation_ends(void=True)
        if not self.optimizers and self.backwards:
            # No optimizer has been seen: one that is compiled will not be, so that passes count.
            self._gather(self.last)
        self._account("forward", now)
        self._end_step()
        self.backwards += 1
        self.backwards_ever += 1
        self.inside = 0.0
        if self.active is not None:
            self._trains(self.active)
        if self.backwards_ever == 2:
            self.products = _products(tensors, self.torch.Tensor)
            self.dirty = True
        if 2 <= self.backwards_ever < 2 + ROWS:
            self.product_rows.append(_rows(tensors, self.torch.Tensor))
            self.dirty = True
        self._note_loss(tensors)
        self.last = _clock()

    def _trains(self, loader):
        """Notes that a backward pass has followed a batch of this loader."""
        loader.trains = True
        self.sources.add(loader.source)
        new = loader.fingerprints[len(self.fingerprints) :]
        if new or loader.replicas != self.replicas:
            self.elements += loader.elements[len(self.fingerprints) :]
            self.fingerprints += new
            self.replicas = loader.replicas or self.replicas
            self.buffered = max(loader.buffered, self.buffered)
            self.dirty = True

    def backward_ends(self, begin):
        self.depth -= 1
        if self.depth > 0:
            return
        now = _clock()
        # Steps of optimizers inside the backward pass are the optimizers' time.
        self.parts["backward"] += max(0.0, now - begin - self.inside)
        self.last = now

    def optimizer_begins(self, optimizer):
        now = _clock()
        if self.depth == 0:
            self._account("other", now)
        if (
            self.backwards_ever == 0
            and self.pending is not None
            and (id(optimizer) in self.stepped or any(loader.batches for loader in self.loaders.values()))
        ):
            self._end_step()  # passes that cannot be seen: a new batch, or the same optimizer, means a new step
        self.in_optimizer = now

    def optimizer_ends(self, optimizer):
        now = _clock()
        if self.depth > 0:  # inside a backward pass
            self.parts["optimizer"] += now - self.in_optimizer
            self.inside += now - self.in_optimizer
            self.last = now
        else:
            self._account("optimizer", now)  # what follows the passes of its closure, if it has one
        if id(optimizer) not in self.optimizers:
            self._new_optimizer(optimizer)
        self.stepped.add(id(optimizer))
        self._gather(now)

    def _gather(self, now):
        """Adds what has happened since the last optimizer step to the pending step."""
        row = self.pending
        if row is None:
            row = self.pending = dict.fromkeys(FIELDS, 0)
            row["loss"] = None
        row["end"], row["steps"] = now, 1
        for loader in list(self.loaders.values()):
            if loader.trains:
                row["samples"] += loader.samples
                row["tokens"] += loader.tokens
                row["batches"] += loader.batches
                for size in loader.sizes:
                    _count(self.batch_sizes, size)
            loader.samples = loader.tokens = loader.batches = 0
            loader.sizes = []
            loader.trains = False
        row["backwards"] += self.backwards
        if self.loss is not None:
            row["loss"] = (row["loss"] or 0.0) + self.loss
        for part, seconds in self.parts.items():
            row[part] += seconds
        self.parts = dict.fromkeys(PARTS, 0.0)
        row["compiling"] += self.compiling
        self.compiling, self.backwards, self.loss = 0.0, 0, None

    def _end_step(self):
        """Ends the pending step, and writes what is due."""
        row, self.pending = self.pending, None
        if row is None:
            return
        _count(self.step_sizes, row["samples"])
        row["optimizers"] = ",".join(sorted([str(self.optimizers[number]) for number in self.stepped]))
        self.stepped = set()
        previous = self.rows[-1] if self.rows else None
        row["seconds"], self.closed = row["end"] - self.closed, row["end"]
        if previous is not None and previous["optimizers"] == row["optimizers"] and previous["seconds"] < SHORT_S:
            row["seconds"] += previous["seconds"]
            for name in SUMMED:
                row[name] += previous[name]
            self.rows[-1] = row
        else:
            self.rows.append(row)
        if row["end"] - self.written >= FLUSH_S:
            self._flush(row["end"])

    def _new_optimizer(self, optimizer):
        self.optimizers[id(optimizer)] = len(self.optimizers)
        self.names.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    name = str(parameter.dtype).replace("torch.", "")
                    self.trained[name] = self.trained.get(name, 0) + parameter.numel()
        self.dirty = True

    def batch_begins(self, iterator, now):
        self.waiting += 1
        if self.waiting > 1:
            return
        loader = self._loader(iterator)
        if loader.source in self.sources:
            self.evaluation_ends()
        elif self.sources and self.evaluation is None:
            self.evaluation_begins()
        if self.depth == 0:
            self._account("other", now)

    def batch_ends(self, iterator, begin, batch):
        now = _clock()
        self.waiting -= 1
        loader = self._loader(iterator)
        self.active = loader
        if self.waiting == 0 and self.depth == 0:
            self.parts["data"] += now - begin
            self.last = now
        if batch is None:
            return
        indices = loader.indices.pop(0) if loader.indices else None
        leading, tokens, elements, leaf = _describe(batch, self.torch)
        loader.batches += 1
        loader.samples += indices or leading or 0
        loader.sizes.append(indices or leading or 0)
        loader.tokens += tokens or 0
        if len(loader.fingerprints) < FINGERPRINTS:
            loader.fingerprints.append(_fingerprint(leaf))
            loader.elements.append(elements)

    def index_taken(self, iterator, index):
        # Samples of a data set that is only iterated are not numbered: the batch itself shows how many there are.
        numbered = getattr(iterator, "_auto_collation", False) and getattr(iterator, "_dataset_kind", 1) == 0
        self._loader(iterator).indices.append(len(index) if numbered and hasattr(index, "__len__") else None)

    def _loader(self, iterator):
        loader = self.loaders.get(iterator)
        if loader is None:
            loader = self.loaders[iterator] = _Loader(iterator)
        return loader

    def evaluation_begins(self):
        if self.evaluation is None:
            now = _clock()
            if self.waiting == 0 and self.depth == 0:
                self._account("other", now)
            self.evaluation = (now, dict(self.parts))

    def evaluation_ends(self, void=False):
        """Ends an evaluation. With `void` its time counts as training: a backward pass came before `train()` and before a
        batch to train on.
        """
        if self.evaluation is None:
            return
        (begin, parts), self.evaluation = self.evaluation, None
        if void:
            return
        now = _clock()
        self.parts = parts
        self.parts["evaluation"] += now - begin
        self.last = now

    def autocast_entered(self, autocast):
        if getattr(autocast, "_enabled", False):
            name = str(autocast.fast_dtype).replace("torch.", "")
            if name not in self.autocast:
                self.autocast.add(name)
                self.dirty = True

    def saved(self, begin):
        if self.evaluation is not None or begin < self.last:  # part of an evaluation, or of a save that saves
            return
        now = _clock()
        self._account("other", begin)
        self.parts["saving"] += now - begin
        self.last = now

    def compilation_begins(self):
        self.compiling_since = _clock()
        self.compilations += 1
        self.dirty = True
        self.write({"compiling": True})

    def compilation_ends(self):
        if self.compiling_since is not None:
            self.compiling += _clock() - self.compiling_since
            self.compiling_since = None
            self.write({"compiling": False})

    def _note_loss(self, tensors):
        loss = tensors if isinstance(tensors, self.torch.Tensor) else tensors[0] if len(tensors) == 1 else None
        # Reading a value on a device would wait for it.
        if loss is not None and loss.numel() == 1 and loss.device.type == "cpu" and type(loss) is self.torch.Tensor:
            self.loss = (self.loss or 0.0) + float(loss.detach())

    def raised(self, error, origin):
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)) or self.ended_by == id(error):
            return
        self.ended_by = id(error)  # not the exception itself, whose frames hold tensors
        kinds, current = [], error
        while current is not None and len(kinds) < 8:
            kinds += [kind.__name__ for kind in type(current).__mro__ if kind not in (object, BaseException, Exception)]
            current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        try:
            message = str(error)
        except Exception as failed:  # its own text may fail
            message = "(its message cannot be printed: " + type(failed).__name__ + ")"
        self.write(
            {"exception": {"type": type(error).__name__, "kinds": kinds, "message": message[:4000], "in": origin}}
        )

    def _flush(self, now):
        if not self.rows and self.file is None:
            return
        self._look_at_memory()
        if self.dirty:
            self.dirty = False
            self.write({"facts": self._facts()})
        rows, self.rows = self.rows, []
        if rows:
            # Short times are written to the microsecond.
            self.write(
                {
                    "facts": {"batch_sizes": self.batch_sizes, "step_sizes": self.step_sizes},
                    "steps": [
                        [round(v, 6) if isinstance(v, float) else v for v in map(row.get, FIELDS)] for row in rows
                    ],
                }
            )
        self.written = now

    def _facts(self):
        rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        return {
            "fields": FIELDS,
            "pid": os.getpid(),
            "began": self.begun,
            "rank": int(rank) if rank is not None else None,
            "world": int(world) if world is not None else None,
            "torch": str(self.torch.__version__),
            "optimizers": self.names,
            "trained": self.trained,
            "autocast": sorted(self.autocast),
            "products": self.products,
            "product_rows": self.product_rows,
            "compiled": self.compilations,
            "backwards_seen": self.backwards_ever > 0,
            "fingerprints": self.fingerprints,
            "elements": self.elements,
            "replicas": self.replicas,
            "buffered": self.buffered,
            "memory": self.memory,
        }

    def _look_at_memory(self):
        """Updates the peaks of this process and its devices, MiB."""
        memory = dict(self.memory)
        # The kernel's high-water mark is that of this program; getrusage's includes what it was forked from.
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    resident = int(line.split()[1]) / 1024
                    if resident > 1.005 * memory.get("resident", 0.0):  # not a line for every page
                        memory["resident"] = resident
                    break
        cuda = getattr(self.torch, "cuda", None)
        if cuda is not None and cuda.is_initialized() and not cuda.is_current_stream_capturing():
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
                earlier = memory.get(str(number), {})
                memory[str(number)] = {name: max(value, earlier.get(name, 0)) for name, value in now.items()}
        if memory != self.memory:
            self.memory = memory
            self.dirty = True

    def write(self, line):
        import json

        if self.file is None:
            folder = os.environ["REDLINE_OBSERVE"]
            os.makedirs(folder, exist_ok=True)
            name = f"{os.getpid()}-{int(self.begun * 1e6)}.jsonl"
            self.file = os.open(
                os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
            self._watch_child()
        os.write(self.file, (json.dumps(line) + "\n").encode())

    def _watch_child(self):
        """Makes a child of multiprocessing, which ends without `atexit`, write its last steps and its exception."""
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self.guarded, args=("child_ends",), exitpriority=0)

    def child_ends(self):
        self.raised(sys.exc_info()[1], "process")
        self.process_ends()

    def close(self):
        """Closes the file."""
        if self.file is not None:
            os.close(self.file)

    def process_ends(self):
        # Set by the interpreter also where the program has replaced `sys.excepthook`.
        self.raised(getattr(sys, "last_value", None), "process")
        self._end_step()
        self._flush(_clock())


def _count(sizes, size):
    if size and (size in sizes or len(sizes) < SIZES):
        sizes[size] = sizes.get(size, 0) + 1


def _describe(batch, torch):
    """Returns the leading dimension that most tensors of a batch share, its tokens (None if it has none), the elements of a
    sample's largest tensor, and the first tensor.
    """
    leaves, tokens = [], None
    pending = [("", batch, 0)]
    if type(batch) is torch.Tensor:
        leaves, pending = [batch] if batch.dim() > 0 else [], []
    while pending and len(leaves) < MOST_LEAVES:
        name, value, depth = pending.pop(0)
        if isinstance(value, torch.Tensor):
            if value.dim() > 0:
                leaves.append(value)
                if tokens is None and name in TOKEN_NAMES:
                    tokens = value.numel()
        elif depth < 4 and hasattr(value, "items") and hasattr(value, "keys"):
            pending += [(str(key), item, depth + 1) for key, item in value.items()]
        elif depth < 4 and isinstance(value, (list, tuple)):
            pending += [(name, item, depth + 1) for item in value[:MOST_LEAVES]]
        elif depth < 4 and hasattr(value, "__dict__"):
            pending += [(key, item, depth + 1) for key, item in vars(value).items()]
    if not leaves:
        return None, None, None, None
    sizes = [leaf.shape[0] for leaf in leaves]
    leaf = leaves[0]
    if tokens is None and leaf.dim() == 2 and not leaf.is_floating_point() and leaf.dtype != torch.bool:
        tokens = leaf.numel()
    elements = max(leaf.numel() // max(1, leaf.shape[0]) for leaf in leaves)
    return max(set(sizes), key=sizes.count), tokens, elements, leaf


def _fingerprint(leaf):
    """A number that differs between batches with other values; None for values on a device."""
    if leaf is None or leaf.device.type != "cpu" or leaf.numel() == 0 or leaf.is_sparse:
        return None
    flat = leaf.detach().reshape(-1) if leaf.is_contiguous() else leaf.detach().flatten()
    return zlib.crc32(repr(flat[:: max(1, flat.numel() // 64)].tolist()).encode())


def _nodes(tensors, tensor_class, fragments):
    """Yields autograd's nodes with these parts of names, those nearest to the loss first. Nothing is unpacked."""
    roots = [tensors] if isinstance(tensors, tensor_class) else list(tensors)
    nodes = collections.deque(root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None)
    seen = set()
    while nodes and len(seen) < MOST_NODES:
        node = nodes.popleft()
        if node in seen:
            continue
        seen.add(node)
        if any(fragment in node.name() for fragment in fragments):
            yield node
        nodes.extend(following for following, _ in node.next_functions if following is not None)


def _products(tensors, tensor_class):
    """Counts the formats of matrix products by the gradients that autograd's nodes take."""
    products = {}
    for node in _nodes(tensors, tensor_class, PRODUCTS):
        for metadata in getattr(node, "_input_metadata", ())[:1]:
            _count(products, str(metadata.dtype).replace("torch.", ""))
    return products


def _rows(tensors, tensor_class):
    """Rows of the product nearest to the loss, or of the results of a compiled model: samples or tokens; None if there is
    neither."""
    for node in _nodes(tensors, tensor_class, (*PRODUCTS, "CompiledFunction")):
        shapes = [
            [int(size) for size in metadata.shape]
            for metadata in getattr(node, "_input_metadata", ())
            if not getattr(metadata, "is_nested_tensor", False)  # whose rows have no number
        ]
        largest = max(shapes, key=math.prod, default=[])
        if len(largest) > 1:
            return largest[0] if "Convolution" in node.name() else math.prod(largest[:-1])
    return None


def _replicas(iterator):
    """Number of replicas that share the data, by the iterator's sampler; None if the sampler does not give it."""
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
