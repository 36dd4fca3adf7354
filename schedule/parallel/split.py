"""A backward pass in two parts: gradients of what a stage received first, those of its weights later."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def leave(result: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result of a stage as torch.distributed.pipelining can take it: the same values in the same memory.

    torch finds what the first part leaves to the second where the ways from weights and from what was
    received meet. A result that depends on weights alone would meet nothing, and their gradients be lost: here
    all meet at the latest. Besides, a result must be no view and nothing received, since it is detached in place.
    """
    entered = next((each for each in received if each.requires_grad), None)
    return result if entered is None or not result.requires_grad else _Leave.apply(result, entered)


def splits(results: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> bool:
    """Whether torch.distributed.pipelining can compute the gradients of a stage in two parts.

    The first part goes back from the results to what was received, the second from every node on that way to
    its weights, each by itself, and frees what it goes through. So nothing beside the way may hang on two of
    its nodes: a weight that is used twice, or a decoder that begins from the batch and is joined by the
    encoder in several places.
    """
    users: dict[Any, list[Any]] = {}
    todo = [each.grad_fn for each in results if each.grad_fn is not None]
    while todo:
        node = todo.pop()
        for each in _before(node):
            if each not in users:
                users[each] = []
                todo.append(each)
            users[each].append(node)
    way = {get_gradient_edge(each).node for each in received if each.requires_grad}
    todo = list(way)
    while todo:
        new = [each for each in users.get(todo.pop(), ()) if each not in way]
        way.update(new)
        todo += new
    hangs_on: dict[Any, Any] = {}
    beside = [(each, node) for node in way for each in _before(node) if each not in way]
    while beside:
        node, owner = beside.pop()
        if node not in hangs_on:
            hangs_on[node] = owner
            beside += [(each, owner) for each in _before(node)]
        elif hangs_on[node] is not owner:
            return False
    return True


def _before(node: Any) -> list[Any]:
    """The nodes whose results a node of the graph was given."""
    return [each for each, _ in node.next_functions if each is not None]


class _Leave(torch.autograd.Function):
    """Hands on its first argument, as if it depended on the second."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
