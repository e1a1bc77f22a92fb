"""A report in headless Chromium, where there is one: it is drawn, in light and dark, and nothing is complained of."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from dhp.report.charts import PALETTE
from dhp.report.page import write_report
from tests.helpers.made_runs import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def look(page: Path, picture: Path, *flags: str, size: str = "1000,3000") -> tuple[np.ndarray, str]:
    """Pixels of the page, and what its console says."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", f"--user-data-dir={picture.parent / 'profile'}", f"--window-size={size}"]
    command += [*flags, f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return np.asarray(Image.open(picture).convert("RGB")), console


def share(pixels: np.ndarray, colour: str) -> float:
    """Of all pixels, those of a colour."""
    return float((pixels == np.array(ImageColor.getrgb(colour))).all(axis=-1).mean())


def test_it_is_drawn_without_complaints(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", saves={5: 0.1})], tmp_path / "report.html")
    pixels, console = look(page, tmp_path / "light.png")
    assert console == ""
    assert tuple(pixels[2, 2]) == (255, 255, 255)
    for colour in PALETTE[1:4]:  # forward, backward, collectives of the bars
        assert share(pixels, colour) > 1e-4
    narrow, console = look(page, tmp_path / "phone.png", size="390,3000")
    assert console == "" and narrow.shape[1] >= 390 and share(narrow, PALETTE[1]) > 1e-4


def test_in_the_dark_it_is_dark(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    pixels, console = look(page, tmp_path / "dark.png", "--blink-settings=preferredColorScheme=0")
    assert console == "" and pixels[2, 2].max() < 60 and pixels.mean() < 90


def test_a_page_that_breaks_its_own_policy_is_seen(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    page.write_text(page.read_text().replace("</body>", "<script>1</script></body>"))
    _, console = look(page, tmp_path / "light.png")
    assert "Content Security Policy" in console
