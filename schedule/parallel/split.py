"""Conditions for a backward pass in two parts: gradients of a stage's inputs first, those of its weights later."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def leave(result: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a stage's result in the form that torch.distributed.pipelining needs: the same values in the same memory.

    torch splits the backward pass at the nodes where the paths from the weights and from the received tensors meet. For a
    result that depends on weights only there is no such node, and their gradients would be lost; the returned result adds
    one. It is neither a view nor a received tensor, since torch detaches it in place.
    """
    input_with_grad = next((tensor for tensor in received if tensor.requires_grad), None)
    return result if input_with_grad is None or not result.requires_grad else _Leave.apply(result, input_with_grad)


def splits(results: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> bool:
    """Returns True if torch.distributed.pipelining can compute the gradients of a stage in two parts.

    The first part runs back from the results to the received tensors. The second runs from every node on that path to
    its weights, separately for each node, and frees the nodes that it visits. No node off the path may therefore be
    reachable from two nodes on it. Counterexamples: a weight that is used twice, or a decoder that starts from the batch
    and uses the encoder's output in several places.
    """
    users: dict[Any, list[Any]] = {}
    nodes_to_visit = [result.grad_fn for result in results if result.grad_fn is not None]
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        for producer in _producers(node):
            if producer not in users:
                users[producer] = []
                nodes_to_visit.append(producer)
            users[producer].append(node)
    path = {get_gradient_edge(tensor).node for tensor in received if tensor.requires_grad}
    nodes_to_visit = list(path)
    while nodes_to_visit:
        new_nodes = [user for user in users.get(nodes_to_visit.pop(), ()) if user not in path]
        path.update(new_nodes)
        nodes_to_visit += new_nodes
    depends_on: dict[Any, Any] = {}
    side_nodes = [
        (producer, path_node) for path_node in path for producer in _producers(path_node) if producer not in path
    ]
    while side_nodes:
        node, path_node = side_nodes.pop()
        if node not in depends_on:
            depends_on[node] = path_node
            side_nodes += [(producer, path_node) for producer in _producers(node)]
        elif depends_on[node] is not path_node:
            return False
    return True


def _producers(node: Any) -> list[Any]:
    """Returns the next nodes of a node of the backward graph, which produced its inputs in the forward pass."""
    return [next_node for next_node, _ in node.next_functions if next_node is not None]


class _Leave(torch.autograd.Function):
    """Returns its first argument, as if it depended on the second."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
