"""Hooks that observe a training inside its own process, a function for each module of torch.

`sitecustomize` calls a function of this file after the program has imported the module that the function hooks;
`_redline_record` gathers and writes the events. Both files import only the standard library, and use the modules of torch that
the program itself has imported. They run in the program's Python, 3.8 or later.

The hooks must not change the program: they draw no random numbers, synchronise no device and print nothing. If the
observer itself fails, it writes the reason into its file and observes nothing further.
"""

import atexit
import functools
import os
import sys
import threading
import time

from _redline_record import Record

_clock = time.monotonic
_record = None
_failed = False


def guarded(event, *arguments):
    """Calls a method of the record. A failure ends the observation and never reaches the program."""
    global _failed
    if _failed:
        return
    try:
        getattr(_record, event)(*arguments)
    except Exception as error:  # whatever it is, the program must run as it would without the observer
        _failed = True
        try:
            _record.write({"fault": f"{type(error).__name__}: {error}"})
        except Exception:  # the file cannot be written either: redline reports that nothing was observed
            _failed = True


def observe_backward(autograd):
    """Observes calls of `torch.autograd.backward`, which `Tensor.backward` calls as well. The first module to be imported."""
    global _record
    _record = Record(guarded)
    backward = autograd.backward

    @functools.wraps(backward)
    def observed(tensors, *arguments, **options):
        guarded("backward_begins", tensors)
        begin = _clock()
        try:
            return backward(tensors, *arguments, **options)
        finally:
            guarded("backward_ends", begin)

    autograd.backward = observed
    guarded("write", {"imported": "torch"})  # a training may follow
    _observe_exceptions()
    atexit.register(guarded, "process_ends")
    os.register_at_fork(after_in_child=_after_fork)


def observe_optimizers(module):
    """Observes the steps of all optimizers, by torch's global hooks."""
    torch = sys.modules["torch"]

    def begins(optimizer, arguments, options):
        if not torch.compiler.is_compiling():  # a compiled step is traced: it must not contain the observer
            guarded("optimizer_begins", optimizer)

    def ends(optimizer, arguments, options):
        if not torch.compiler.is_compiling():
            guarded("optimizer_ends", optimizer)

    module.register_optimizer_step_pre_hook(begins)
    module.register_optimizer_step_post_hook(ends)


def observe_loaders(module):
    """Observes the batches that leave any DataLoader. torch has no hook for them."""
    iterator = module._BaseDataLoaderIter
    following, indices = iterator.__next__, iterator._next_index

    @functools.wraps(following)
    def observed(self):
        begin, batch = _clock(), None
        guarded("batch_begins", self, begin)
        try:
            batch = following(self)
            return batch
        finally:
            guarded("batch_ends", self, begin, batch)

    @functools.wraps(indices)
    def observed_indices(self):
        index = indices(self)
        guarded("index_taken", self, index)
        return index

    iterator.__next__, iterator._next_index = observed, observed_indices


def observe_evaluation(module):
    """Observes `Module.eval()`, and the `train()` that follows it."""
    cls = module.Module
    evaluate, train = cls.eval, cls.train

    @functools.wraps(train)
    def observed_train(self, mode=True):
        if mode and cls.train is observed_train:
            cls.train = train  # observed only while an evaluation runs, as it is called for every module
            guarded("evaluation_ends")
        return train(self, mode)

    @functools.wraps(evaluate)
    def observed_eval(self):
        evaluated = evaluate(self)
        guarded("evaluation_begins")
        if not _failed and cls.train is train:  # not a function that the program has put there
            cls.train = observed_train
        return evaluated

    cls.eval = observed_eval


def observe_autocast(module):
    """Observes the number formats of entered autocast contexts."""
    enter = module.autocast.__enter__

    @functools.wraps(enter)
    def observed(self):
        guarded("autocast_entered", self)
        return enter(self)

    module.autocast.__enter__ = observed


def observe_saving(module):
    """Observes the time of calls of `module`'s functions that save."""
    for name in ("save", "save_file", "async_save"):
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, _saving(function))


def _saving(function):
    @functools.wraps(function)
    def observed(*arguments, **options):
        begin = _clock()
        try:
            return function(*arguments, **options)
        finally:
            guarded("saved", begin)

    return observed


def observe_compilation(module):
    """Observes the time of torch.compile."""
    module.callback_handler.register_start_callback(lambda *_: guarded("compilation_begins"))
    module.callback_handler.register_end_callback(lambda *_: guarded("compilation_ends"))


def _observe_exceptions():
    """Observes the exception that ends the process, or one of its threads."""
    previous, previous_of_threads = sys.excepthook, threading.excepthook

    def hook(kind, error, traceback):
        guarded("raised", error, "process")
        previous(kind, error, traceback)

    def hook_of_threads(arguments):
        guarded("raised", arguments.exc_value, "thread")
        previous_of_threads(arguments)

    sys.excepthook, threading.excepthook = hook, hook_of_threads


def _after_fork():
    """A forked child, such as a worker of a DataLoader, has a record of its own."""
    global _record
    guarded("close")
    _record = Record(guarded)
