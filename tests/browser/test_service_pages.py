"""The service's pages in a browser: login by token, live updates, and protection against other sites' forms."""

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
import served as served_module
from redline.base.errors import NotFound
from redline.service import searchers
from redline.service.cluster import STARTING
from redline.service.records import SearchState
from redline.service.scheduling import Kind
from redline.service.store.running import Report
from served import SEARCH, served

H100 = Kind("NVIDIA H100 80GB HBM3", "cuda", 8, 81_000)


@contextlib.contextmanager
def with_devices(service):
    """Gives the cluster devices, on which processes of searches end at once."""
    service.cluster.kinds, service.cluster.failure = (H100,), None
    try:
        yield
    finally:
        service.cluster.kinds, service.cluster.failure = (), STARTING


@pytest.fixture(scope="module", autouse=True)
def played():
    with pytest.MonkeyPatch.context() as patch:
        played_search = Path(served_module.__file__).with_name("played_search.py")
        patch.setattr(searchers, "COMMAND", (sys.executable, str(played_search)))
        yield


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("service")) as running:
        yield running


def log_in(tab, service, role="submitter"):
    """Opens the first page and logs in."""
    tab.context.clear_cookies()
    tab.goto(service.address)
    tab.get_by_label("Token").fill(service.tokens[role])
    tab.get_by_role("button", name="Log in").click()
    tab.wait_for_url(f"{service.address}/")
    tab.get_by_role("heading", name="Queue").wait_for()


def test_a_wrong_token_does_not_open_the_pages(tab, service, expect):
    tab.context.clear_cookies()
    tab.goto(service.address)
    tab.get_by_label("Token").fill("redline_00000000_forged")
    tab.get_by_role("button", name="Log in").click()
    expect(tab.get_by_role("alert")).to_contain_text("is unknown")
    tab.errors[:] = [each for each in tab.errors if "401" not in each]  # the browser logs the status
    tab.goto(service.address)
    expect(tab).to_have_url(f"{service.address}/login")


def test_a_search_is_submitted_seen_live_and_cancelled(tab, service, expect):
    log_in(tab, service)
    expect(tab.locator("#who")).to_have_text("submitter, submitter")
    tab.get_by_role("link", name="Submit", exact=True).click()
    tab.get_by_label("Model").fill("gpt2-tny")
    tab.get_by_label("Trials").fill("5")
    tab.get_by_role("button", name="Submit").click()
    expect(tab.get_by_role("alert")).to_contain_text("did you mean 'gpt2-tiny'")
    tab.errors[:] = [each for each in tab.errors if "422" not in each]
    tab.get_by_label("Model").fill("gpt2-tiny")
    tab.get_by_label("Name (optional)").fill("<b>bold</b>")
    tab.get_by_role("button", name="Submit").click()
    tab.wait_for_url(re.compile("#/search/[0-9a-f]{12}$"))
    search = tab.url.rpartition("/")[2]
    assert service.store.search(search).request == {"target": "gpt2-tiny", "trials": 5, "devices": 1}
    expect(tab.get_by_role("heading", name="<b>bold</b>")).to_be_visible()  # HTML in a name is shown as text
    expect(tab.locator(".state")).to_have_text("queued")
    service.store.give_devices(search, "NVIDIA H100", 1)
    expect(tab.locator(".state")).to_have_text("running")
    tab.get_by_role("link", name="Queue").click()
    row = tab.locator(f"[data-search='{search}']")
    expect(row).to_contain_text("running")
    row.get_by_role("button", name="Cancel").click()
    expect(row).to_contain_text("cancelled")
    assert service.store.search(search).state == "cancelled"


def actions(tab):
    """Labels of the buttons of a search's page."""
    return tab.locator(".actions button").all_inner_texts()


def test_a_search_is_cancelled_retried_and_deleted_on_its_page(tab, service, expect):
    store = service.store
    search = service.client().post("/v1/searches", json=SEARCH).json()["id"]
    log_in(tab, service)
    tab.goto(f"{service.address}/#/search/{search}")
    buttons = tab.locator(".actions")
    expect(buttons.get_by_role("button", name="Cancel")).to_be_visible()
    assert actions(tab) == ["Cancel"]
    buttons.get_by_role("button", name="Cancel").click()
    expect(buttons.get_by_role("button", name="Retry")).to_be_visible()
    assert store.search(search).state == "cancelled" and actions(tab) == ["Retry", "Delete"]
    buttons.get_by_role("button", name="Retry").click()
    expect(tab.locator(".state")).to_have_text("queued")
    assert store.search(search).state == "queued"
    service.ends(search, "failed", "its disk was full")
    delete = tab.locator(f"[data-delete='{search}']")
    expect(delete).to_have_text("Delete")
    delete.click()
    expect(delete).to_have_text("Delete it for good?")
    assert store.search(search).state == "failed", "the first click asks"
    delete.click()
    expect(tab.get_by_role("heading", name="Queue")).to_be_visible()
    expect(tab.locator(f"[data-search='{search}']")).to_have_count(0)
    with pytest.raises(NotFound):
        store.search(search)
    tab.goto("about:blank")  # ends its requests
    tab.errors[:] = [each for each in tab.errors if "404" not in each]  # if the event comes before the answer


def test_an_action_that_is_refused_says_why_and_others_searches_have_no_buttons(tab, service, expect):
    store = service.store
    search = service.client().post("/v1/searches", json=SEARCH).json()["id"]
    log_in(tab, service, "other")
    tab.goto(f"{service.address}/#/search/{search}")
    expect(tab.locator(".state")).to_have_text("queued")
    assert actions(tab) == []
    log_in(tab, service)
    tab.goto(f"{service.address}/#/search/{search}")
    cancel = tab.locator(f"[data-cancel='{search}']")
    expect(cancel).to_be_visible()
    store.change_user("submitter", role="reader")
    cancel.click()
    expect(tab.get_by_role("alert")).to_contain_text("reader")
    expect(cancel).to_be_enabled()
    assert store.search(search).state == "queued"
    store.change_user("submitter", role="submitter")
    store.cancel(search)
    tab.errors[:] = [each for each in tab.errors if "403" not in each]


def test_devices_and_events_show_what_happens(tab, service, expect):
    log_in(tab, service, "reader")
    tab.get_by_role("link", name="Devices").click()
    expect(tab.get_by_text("The Ray cluster is not reached")).to_be_visible()
    user = service.store.user("submitter")
    search = service.store.submit(user, {"target": "runs"}, devices=1)[0].id  # until it is cancelled
    service.store.give_devices(search, H100.name, 4)
    service.store.charge({search: 1800.0})
    with with_devices(service):
        row = tab.get_by_role("table", name="Devices").get_by_role("row").nth(1)
        expect(row).to_contain_text("NVIDIA H100 80GB HBM3")
        expect(row).to_contain_text("4 of 8")
        expect(tab.get_by_role("table", name="Use").get_by_role("row").nth(1)).to_contain_text("submitter")
    tab.get_by_role("link", name="Events").click()
    service.store.add_event(None, "said", {"message": "something new"})
    expect(tab.locator(".events")).to_contain_text("something new")
    service.store.cancel(search)
    expect(tab.locator(".events")).to_contain_text(f"{search} is cancelled")


def test_a_reader_sees_no_buttons_that_change(tab, service, expect):
    search = service.client().post("/v1/searches", json=SEARCH).json()["id"]
    log_in(tab, service, "reader")
    expect(tab.locator(f"[data-search='{search}']")).to_be_visible()
    assert tab.get_by_role("button", name="Cancel").count() == 0
    service.store.cancel(search)


def test_another_site_s_page_changes_nothing(tab, service, expect):
    """A forged form can send at most the cookie, and browsers do not send even that from another site."""
    log_in(tab, service)
    cookie = next(each for each in tab.context.cookies() if each["name"].startswith("redline-session"))
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    before = len(service.store.searches(limit=1000))
    with service.client(None, cookies={cookie["name"]: cookie["value"]}) as forged:
        assert forged.get("/v1/me").status_code == 200
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            answer = forged.post("/v1/searches", json=SEARCH, headers=headers)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "csrf"
            assert forged.post("/login", data={"token": "x"}, headers=headers).status_code == 403
    assert len(service.store.searches(limit=1000)) == before
    policy = service.client(None).get("/login").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "form-action 'self'" in policy and "frame-ancestors 'none'" in policy


def test_a_run_s_figures_are_those_of_the_dashboard(tab, service, expect):
    import redline as rl

    search = service.client().post("/v1/searches", json=SEARCH).json()["id"]
    folder = service.parts.runs.folder(search)
    space = rl.Space.from_dict({"knobs": [{"name": "micro_batch", "type": "choice", "values": [1, 2, 4]}]})
    rl.tune(lambda config: 10.0 * config["micro_batch"], space, isolate=False, sampler="grid", trials=3, out=folder)
    service.store.give_devices(search, H100.name, 1)
    service.store.add_reports(search, 0, 9, [Report(time=1.0, kind="finished", data={"trial": 2, "done": 3})], None)
    service.store.take_devices(search, SearchState.DONE, "all tried")
    log_in(tab, service)
    tab.locator(f"[data-search='{search}']").get_by_role("link").click()
    tab.get_by_role("link", name="The run with its trials and figures").click()
    expect(tab.locator("#headline")).to_be_visible()
    assert tab.url.startswith(f"{service.address}/runs/#/run/{search}")
    tab.get_by_role("link", name="All runs").click()
    expect(tab.get_by_role("heading", name="Queue")).to_be_visible()  # the service has only one list
    tab.goto(service.address)
    tab.get_by_role("button", name="Log out").click()
    expect(tab).to_have_url(f"{service.address}/login")
    answer = tab.request.get(f"{service.address}/runs/api/runs", max_redirects=0)
    assert answer.status == 303 and "micro_batch" not in json.dumps(answer.headers)


def test_a_reader_is_offered_nothing_to_submit_by(tab, service, expect):
    log_in(tab, service, "reader")
    assert tab.get_by_role("link", name="Submit").count() == 0
    tab.goto(f"{service.address}/#/submit")
    expect(tab.get_by_text("ask an admin for the role submitter")).to_be_visible()
    assert tab.locator("#page form").count() == 0


def test_the_queue_says_why_each_search_waits(tab, service, expect):
    big = service.client().post("/v1/searches", json={"request": {**SEARCH["request"], "devices": 64}}).json()["id"]
    elsewhere = service.client().post("/v1/searches", json={**SEARCH, "device": "TPU"}).json()["id"]
    with with_devices(service):
        log_in(tab, service, "reader")
        row = tab.locator(f"[data-search='{big}']")
        expect(row).to_contain_text("needs 64 devices of one kind, and the cluster has at most 8")
        expect(tab.locator(f"[data-search='{elsewhere}']")).to_contain_text("the cluster has no 'TPU'")
    for each in (big, elsewhere):
        service.store.cancel(each)
    expect(tab.get_by_role("table", name="Ended").locator(f"[data-search='{big}']")).to_contain_text("cancelled")


def test_every_page_fits_a_phone_and_a_desk(tab, service, overflow, phone, desktop):
    """Tests the longest names, and a search with every element of a row."""
    store = service.store
    long = store.submit(store.user("submitter"), {"target": "gpt2-tiny"}, devices=8, name="n" * 200)[0].id
    log_in(tab, service)
    for size in (phone, desktop):
        tab.set_viewport_size(size)
        for page in ("", "devices", "submit", "events", f"search/{long}"):
            tab.goto(f"{service.address}/#/{page}")
            tab.locator("h1").wait_for()
            tab.wait_for_timeout(300)
            assert overflow(tab) <= 0, (size, page)
    tab.set_viewport_size(desktop)
    store.cancel(long)
