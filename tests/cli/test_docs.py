"""docs/cli.md says what the commands say."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_cli_docs.py"


def test_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_cli_docs", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.page()
    assert script.PAGE.read_text(encoding="utf-8") == page, "run python scripts/make_cli_docs.py"
    assert all(f"## dspark {name}\n" in page for name in ("generate", "chat", "doctor"))
    assert "--show-drafts" in page and "Examples:" in page
