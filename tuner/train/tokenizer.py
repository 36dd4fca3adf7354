"""Which tokenizer a training has that begins with a checkpoint: that checkpoint's, unless another is asked for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...models.layouts.beside import difference, own_tokenizer
from ...training.data.plan import BYTES
from ...training.data.sources import OF_TOKENS, find_sources
from .request import TrainRequest


def with_tokenizer(request: TrainRequest, say: Callable[[str], None]) -> TrainRequest:
    """The request, with the tokenizer of the checkpoint that it begins with where it names none and its data is text.

    Args:
        request: what is asked.
        say: told what a user should know: that another tokenizer is given than the weights were learnt with, or none is there.

    Raises:
        WorkloadError: the data is not there, or a tokenizer cannot be loaded.
    """
    if request.weights is None or not request.paths or find_sources(request.paths)[0].kind in OF_TOKENS:
        return request
    own = own_tokenizer(request.weights)
    if request.tokenizer is None:
        if own is not None:
            return replace(request, tokenizer=str(own))
        say(
            f"'{request.weights}' has no tokenizer and none is given: text is read by bytes; --tokenizer names a folder of one"
        )
    elif own is not None and request.tokenizer == BYTES:
        say(f"text is read by bytes, as asked, but the weights were learnt with the tokenizer in '{own}'")
    elif own is not None and (how := difference(Path(request.tokenizer), own)):
        say(
            f"the tokenizer in '{request.tokenizer}' is another than the one in '{own}', with which the weights were learnt: "
            f"{how}; without --tokenizer the checkpoint's is taken"
        )
    return request
