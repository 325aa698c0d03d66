"""Write docs/images/dashboard*.png of a server: `python scripts/make_dashboard_pictures.py URL`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the browser is the tests'

from tests.serve.browser import Browser, chromium  # noqa: E402

WAIT_S = 300
MOST_HEIGHT = 1700  # pixels
PICTURES = (("dashboard.png", 1100, False), ("dashboard-dark.png", 1100, True), ("dashboard-narrow.png", 360, False))


def save_whole(browser: Browser, path: Path, width: int, dark: bool) -> None:
    """A picture of the page from its top to its end, or as much of it as a document wants."""
    browser.look(width, 400, dark)
    browser.look(width, min(MOST_HEIGHT, browser.run("return document.documentElement.scrollHeight")), dark)
    browser.save(path)


def main(url: str) -> None:
    folder = ROOT / "docs" / "images"
    folder.mkdir(exist_ok=True)
    with chromium() as browser:
        browser.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        browser.open(url)
        browser.wait(lambda: "proposer" in browser.text("#about"))
        browser.fill("#seed", "7")
        browser.fill("#max-tokens", "120")
        browser.find("#race").click()
        browser.wait(lambda: browser.text("#status").startswith("The texts"), WAIT_S)
        for name, width, dark in PICTURES:
            save_whole(browser, folder / name, width, dark)
        print(browser.text("#status"), *browser.errors(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
