"""A headless Chromium for tests that look at a page; they are skipped where there is none."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 20
_NAMES = ("chromium", "google-chrome", "chromium-browser")


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page afresh; what the console says of the one before is forgotten."""
        self.driver.get("about:blank")
        self.errors()
        self.look()
        self.driver.get(url)

    def look(self, width: int = 1100, height: int = 1400, dark: bool = False) -> None:
        """Give the window another size, in CSS pixels, or the user another taste."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The text as the document holds it: line breaks and spaces kept, hidden or not."""
        return self.find(selector).get_property("textContent")

    def fill(self, selector: str, value: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(value)

    def press(self, *keys: str) -> None:
        """Keys go where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def wait(self, condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
        """Until the condition holds. Raises AssertionError when it never does."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.wait import WebDriverWait

        try:
            return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())
        except TimeoutException:
            raise AssertionError(f"never came true; the page says {self.text('body')[-2000:]!r}") from None

    def errors(self) -> list[str]:
        """What the console complains of since the last call: failed requests, exceptions, breaches of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def save(self, path: Path) -> None:
        """A picture of the window."""
        assert self.driver.save_screenshot(str(path))


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test without selenium, Chromium or its driver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs a browser test's driver: pip install selenium")
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    driver_program = shutil.which("chromedriver")
    if program is None or driver_program is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Nothing outside this machine has a name.
    for flag in (
        "headless=new",
        "disable-gpu",
        "disable-dev-shm-usage",
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(f"--{flag}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium has none for root
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver_program))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
