"""Hooks and exchanges of a module whose operations an enclosing graph contains are refused, never lost."""

import pytest
import torch
from redline.base.errors import ScheduleError
from redline.schedule import build, create_schedule
from redline.schedule.graph.called import check_read
from torch import nn
from torch.nn import functional as F


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return F.gelu(self.fc(x))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.more = Inner(), nn.LayerNorm(8), nn.ModuleList([Inner()])

    def forward(self, x):
        return self.more[0](self.norm(self.inner(x)))


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x)


@pytest.fixture
def sch():
    torch.manual_seed(0)
    return create_schedule(Outer())


AROUND = {
    "hook": lambda at: at.hook("fwd_post", lambda module, args, output: output * 2),
    "checkpoint": lambda at: at.checkpoint(),
    "cast": lambda at: at.cast(torch.bfloat16),
    "compile": lambda at: at.compile(backend="eager"),
    "offload": lambda at: at.offload("activations"),
    "replace": lambda at: at.replace(Other()),
    "trace": lambda at: at.trace(),
}


@pytest.mark.parametrize("primitive", AROUND)
@pytest.mark.parametrize("path", ["inner", "more.0"])
def test_a_primitive_on_a_module_that_a_graph_has_taken_in_is_refused(sch, primitive, path):
    sch.trace(flatten=True)
    before = (str(sch), len(sch.tree.deferred), sch[path].module)
    with pytest.raises(ScheduleError, match=f"{primitive} on '{path}': the graph of 'the root' does not call it"):
        AROUND[primitive](sch[path])
    assert (str(sch), len(sch.tree.deferred), sch[path].module) == before


def test_modules_still_called_by_the_graph_take_primitives(sch):
    seen = []
    sch.trace(flatten=True)
    sch["norm"].hook("fwd_post", lambda module, args, output: seen.append(module))
    sch["inner.fc"].hook("fwd_post", lambda module, args, output: seen.append(module))
    model, _ = build(sch)
    model(torch.randn(2, 8))
    assert seen == [model.inner.fc, model.norm]


def test_layers_whose_weights_alone_are_read_are_named(sch):
    linears = [sch["inner.fc"].module, sch["more.0.fc"].module]
    check_read(sch, "float8", linears)
    sch.trace(flatten=True)
    check_read(sch, "float8", linears)
    pattern = gelu_of_linear
    sch.replace(pattern, sch.find(pattern)[0])
    with pytest.raises(
        ScheduleError, match="float8 on 'Outer': a graph reads the weights of 'inner.fc' without calling it"
    ):
        check_read(sch, "float8", linears)


def gelu_of_linear(x, w, b):
    return F.gelu(F.linear(x, w, b))
