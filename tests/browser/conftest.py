"""A real browser, and a dashboard served from this process."""

import contextlib
import importlib.util
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def context(tmp_path_factory):
    """A browser's context with a profile of its own. REDLINE_REQUIRE_BROWSER=1 makes a missing browser a failure."""
    required = os.environ.get("REDLINE_REQUIRE_BROWSER") == "1"
    if CHROMIUM is None:
        (pytest.fail if required else pytest.skip)(
            "no chromium on this machine: apt-get install chromium (`.ci/run` does)"
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        (pytest.fail if required else pytest.skip)("playwright is not installed: pip install 'redline[test]'")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")), executable_path=CHROMIUM, headless=True, args=FLAGS,
            viewport=DESKTOP, accept_downloads=True,
        )  # fmt: skip
        made.set_default_timeout(60_000)
        made.grant_permissions(["clipboard-read", "clipboard-write"])
        yield made
        made.close()


@pytest.fixture
def tab(context):
    """A page that fails its test on any script error, and on any request to another server."""
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on(
        "request",
        lambda request: (
            errors.append(request.url)
            if not request.url.startswith(("file:", "http://127.0.0.1:", "data:", "blob:"))
            else None
        ),
    )
    page.errors = errors
    yield page
    page.close()
    assert errors == []


@contextlib.contextmanager
def _serving():
    from redline.views.dashboard import serve

    servers, threads = [], []

    def start(folder, messages=None, **options):
        printed, ready = [] if messages is None else messages, threading.Event()

        def on_start(server):
            servers.append(server)
            ready.set()

        thread = threading.Thread(
            target=serve, args=(folder,), kwargs={"port": 0, "say": printed.append, "started": on_start} | options
        )
        thread.start()
        threads.append(thread)
        assert ready.wait(20)
        deadline = time.monotonic() + 20
        while not servers[-1].started and time.monotonic() < deadline:
            time.sleep(0.02)
        return next(line for line in printed if "http://" in line).split()[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.should_exit = True
        for thread in threads:
            thread.join(20)


@pytest.fixture(scope="session")
def serving_factory():
    """Returns the context manager behind `serving`, for fixtures that outlive a test."""
    return _serving


@pytest.fixture
def serving():
    """Yields `serving(folder)`, which serves a folder in a thread until the test ends, and returns the address."""
    with _serving() as start:
        yield start


@pytest.fixture(scope="session")
def phone():
    return PHONE


@pytest.fixture(scope="session")
def desktop():
    return DESKTOP


def overflow(page):
    """Pixels by which a page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.fixture(scope="session", name="overflow")
def overflow_fixture():
    return overflow


@pytest.fixture(scope="session")
def expect(context):
    """Playwright's assertions, which wait until they are true."""
    from playwright.sync_api import expect

    return expect


@pytest.fixture(scope="session")
def disk():
    """The module that writes runs."""
    spec = importlib.util.spec_from_file_location("runs_on_disk", Path(__file__).with_name("runs_on_disk.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
