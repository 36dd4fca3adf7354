"""One host agent for the searches and trainings of tests that run in this process: starting one costs seconds."""

import pytest
from redline.runners import local
from redline.runners.host import PLAIN_IMPORTS, HostAgent
from redline.tuner import tuning


class KeptAgent(HostAgent):
    """An agent that outlives those that it is lent to."""

    def close(self):
        assert not self._running, "what was lent it has ended what it ran"

    def end(self):
        super().close()


@pytest.fixture(scope="session")
def kept_agent():
    made = []

    def lend(imports=()):
        if not made:
            made.append(KeptAgent(PLAIN_IMPORTS))
        made[0].also_import(imports)
        return made[0]

    yield lend
    for each in made:
        each.end()


@pytest.fixture(scope="module")
def one_agent(kept_agent):
    """What is started in this process on this machine has the same agent, which is started when it is first needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "HostAgent", kept_agent)
        patch.setattr(tuning, "HostAgent", kept_agent)
        yield
