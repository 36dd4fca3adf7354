"""Attacks are sent repeatedly while fifty clients send requests: each attack is refused, and no client waits long.

Bounds are wide, as the machine may be busy.
"""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from attacks import ATTACKS, attacked, half_open
from served import served

WORKING = 50
LASTS_S = 3.0
LONGEST_S = 20.0
"""Longest time that a client may be without an answer, s."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("attacked")) as running:
        yield running


def work(client, number, end, gaps):
    """Sends requests until `end`, at least one, and records the longest time without an answer in `gaps`."""
    path, status = ("/v1/me", 200) if number % 2 == 0 else ("/v1/searches/0123456789ab/cancel", 404)
    last = time.monotonic()
    while number not in gaps or time.monotonic() < end:
        answer = client.request("GET" if status == 200 else "POST", path)
        assert answer.status_code == status, answer.text
        now = time.monotonic()
        gaps[number] = max(gaps.get(number, 0.0), now - last)
        last = now
        time.sleep(0.05)


def test_fifty_who_work_are_answered_while_each_attack_is_refused(service):
    gaps = {}
    with contextlib.ExitStack() as held, ThreadPoolExecutor(WORKING + 2) as pool:
        clients = [held.enter_context(service.client()) for _ in range(WORKING)]
        held.enter_context(half_open(service.address, 300))
        end = time.monotonic() + LASTS_S
        working = [pool.submit(work, client, number, end, gaps) for number, client in enumerate(clients)]
        attacking = [pool.submit(attacked, service.address, service.tokens, end) for _ in range(2)]
        for each in working:
            each.result()
        seen = [found for each in attacking for found in each.result()]
    assert len(gaps) == WORKING and max(gaps.values()) < LONGEST_S, sorted(gaps.values())[-5:]
    assert {name for name, _, _ in seen} == set(ATTACKS)
    assert all(400 <= status < 500 for _, status, _ in seen), {each[:2] for each in seen}
    assert service.store.searches() == []
