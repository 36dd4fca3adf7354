"""A backward pass in two parts: gradients of a stage's inputs first, those of its weights later."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def leave(result: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a stage's result in the form that torch.distributed.pipelining needs: the same values in the same memory.

    torch splits the backward pass at the nodes where the paths from the weights and from the received tensors meet. The
    path of a result that depends on weights alone would meet none, and their gradients would be lost; the returned result
    makes all paths meet at the latest. It is also neither a view nor a received tensor, since torch detaches it in place.
    """
    entered = next((each for each in received if each.requires_grad), None)
    return result if entered is None or not result.requires_grad else _Leave.apply(result, entered)


def splits(results: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> bool:
    """Returns True if torch.distributed.pipelining can compute the gradients of a stage in two parts.

    The first part runs back from the results to the received tensors. The second runs from every node on that path to
    its weights, separately for each node, and frees the nodes that it visits. No node off the path may therefore be
    reachable from two nodes on it. Counterexamples: a weight that is used twice, or a decoder that starts from the batch
    and that the encoder joins in several places.
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
    depends_on: dict[Any, Any] = {}
    beside = [(each, node) for node in way for each in _before(node) if each not in way]
    while beside:
        node, owner = beside.pop()
        if node not in depends_on:
            depends_on[node] = owner
            beside += [(each, owner) for each in _before(node)]
        elif depends_on[node] is not owner:
            return False
    return True


def _before(node: Any) -> list[Any]:
    """Returns the next nodes of a node of the backward graph: those that produced its inputs in the forward pass."""
    return [each for each, _ in node.next_functions if each is not None]


class _Leave(torch.autograd.Function):
    """Returns its first argument, as if it depended on the second."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
