"""One host agent for all tests of a session: starting an agent takes seconds, a trial a tenth of a second."""

import pytest


@pytest.fixture(scope="session")
def kept_agent():
    """Replaces `HostAgent`: calls with the same environment return the same agent, which lasts until the session ends."""
    from redline.runners.host.client import PLAIN_IMPORTS, HostAgent

    class KeptAgent(HostAgent):
        def close(self):
            assert not self._running, "what was lent it has ended what it ran"

    made = {}

    def lend(imports=PLAIN_IMPORTS, environment=None):
        key = frozenset((environment or {}).items())
        if key not in made:
            made[key] = KeptAgent(PLAIN_IMPORTS, environment)
        made[key].also_import(imports)
        return made[key]

    yield lend
    for each in made.values():
        HostAgent.close(each)


@pytest.fixture(scope="session", autouse=True)
def _one_agent(kept_agent):
    """Makes runners and searches in this process use the shared agent, which starts when it is first needed."""
    from redline.runners.place import emulate, local
    from redline.tuner import runner_start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "HostAgent", kept_agent)
        patch.setattr(runner_start, "HostAgent", kept_agent)
        patch.setattr(emulate, "HostAgent", kept_agent)
        yield
