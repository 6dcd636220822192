"""What a researcher sees: the login, a notebook that runs, its curve in TensorBoard. The pictures are in docs/."""

from __future__ import annotations

import os
import time
from pathlib import Path

import requests
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.browser.conftest import PICTURES, Running, wait

TRAIN = [
    "import torch\nfrom torch.utils.tensorboard import SummaryWriter\n\n"
    "torch.manual_seed(0)\nx = torch.randn(512, 8)\ny = (x.sum(1, keepdim=True) > 0).float()\n"
    "model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))\n"
    "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)",
    "with SummaryWriter('/workspace/runs/first') as log:\n    for step in range(200):\n"
    "        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y)\n"
    "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
    "        log.add_scalar('loss', loss.item(), step)\n"
    "right = ((model(x) > 0) == (y > 0.5)).float().mean().item()\n"
    "print('learned' if right > 0.95 else 'not learned', f'{right:.3f}')",
]
SHOW = [
    "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.scatter(x.sum(1), model(x).detach())\nplt.show()",
    "%load_ext tensorboard\n%tensorboard --logdir /workspace/runs",
]


def visible(browser: webdriver.Chrome, selector: str, by: str = By.CSS_SELECTOR) -> WebElement | None:
    return next((element for element in browser.find_elements(by, selector) if element.is_displayed()), None)


def text(browser: webdriver.Chrome, selector: str) -> str:
    element = visible(browser, selector)
    return element.text if element else ""


def width(browser: webdriver.Chrome, selector: str) -> float:
    element = visible(browser, selector)
    return element.size["width"] if element else 0


def log_in(browser: webdriver.Chrome, running: Running, token: str) -> None:
    browser.get(f"{running.url}/lab")
    field = wait(lambda: visible(browser, "input[type=password]"), "the login page")
    field.send_keys(token, Keys.ENTER)


def run_cell(browser: webdriver.Chrome, index: int) -> None:
    """Runs a cell as a person does, and waits for its end."""
    cell = f".jp-Notebook .jp-Cell[data-windowed-list-index='{index}']"
    wait(lambda: clicked(browser, f"{cell} .cm-content"), f"cell {index}")
    wait(lambda: visible(browser, f"{cell} .cm-focused"), f"the cursor in cell {index}")
    dialogs = [dialog.text for dialog in browser.find_elements(By.CSS_SELECTOR, ".jp-Dialog")]
    assert dialogs == []
    # On a busy machine, JupyterLab lost the first keys. Ctrl+Enter runs the same cell again, Shift+Enter the next one.
    for _ in range(30):
        ActionChains(browser).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
        time.sleep(2)
        if text(browser, f"{cell} .jp-InputPrompt").strip("[]: \n"):
            break
    # A busy machine took more than 90 s to import PyTorch and train.
    wait(lambda: ended(browser, cell), f"the end of cell {index}", seconds=300)


def clicked(browser: webdriver.Chrome, selector: str, by: str = By.CSS_SELECTOR) -> bool:
    element = visible(browser, selector, by)
    if element is None:
        return False
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
    return True


def visible_in_frame(browser: webdriver.Chrome, frame_selector: str, selector: str) -> bool:
    """Looks for the frame each time: the notebook may replace it while it loads."""
    browser.switch_to.default_content()
    frame = visible(browser, frame_selector)
    if frame is None:
        return False
    browser.switch_to.frame(frame)
    return visible(browser, selector) is not None


def ended(browser: webdriver.Chrome, cell: str) -> bool:
    """Whether a number stands before the cell, instead of nothing or an asterisk."""
    return any(letter.isdigit() for letter in text(browser, f"{cell} .jp-InputPrompt"))


def picture(browser: webdriver.Chrome, name: str, tmp_path: Path) -> None:
    """Saved beside the test; into docs/ only if asked for, so that a test run leaves the checkout as it is."""
    folder = PICTURES if os.environ.get("UPDATE_PICTURES") == "1" else tmp_path
    assert browser.save_screenshot(str(folder / name))


def test_a_wrong_token_does_not_log_in(browser: webdriver.Chrome, running: Running) -> None:
    log_in(browser, running, "0" * 48)
    wait(lambda: "Invalid credentials" in browser.page_source, "the refusal")
    assert not browser.get_cookies() or all("username" not in cookie["name"] for cookie in browser.get_cookies())
    browser.get(f"{running.url}/lab")
    assert "/login" in browser.current_url


def test_a_notebook_trains_and_tensorboard_shows_its_curve(
    browser: webdriver.Chrome, running: Running, tmp_path: Path
) -> None:
    cells: list[dict[str, object]] = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for i, source in enumerate([*TRAIN, *SHOW])
    ]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = {"cells": cells, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}
    saved = requests.put(
        f"{running.url}/api/contents/train.ipynb",
        json={"type": "notebook", "content": notebook},
        headers={"Authorization": f"token {running.token}"},
        timeout=30,
    )
    assert saved.status_code == 201, saved.text

    log_in(browser, running, running.token)
    wait(lambda: visible(browser, ".jp-LauncherCard[title*='TensorBoard']"), "the launcher with its TensorBoard tile")

    browser.get(f"{running.url}/lab/tree/train.ipynb")
    wait(lambda: visible(browser, ".jp-Notebook .jp-Cell .cm-content"), "the notebook")
    wait(lambda: visible(browser, ".jp-Notebook-ExecutionIndicator[data-status=idle]"), "the kernel")
    for index in range(len(TRAIN)):
        run_cell(browser, index)
    output = wait(lambda: text(browser, ".jp-OutputArea-output pre"), "the output of the last cell")
    assert output.startswith("learned ")
    run_cell(browser, len(TRAIN))
    wait(lambda: width(browser, ".jp-OutputArea-output img") > 300, "the plot")
    picture(browser, "jupyterlab.png", tmp_path)

    run_cell(browser, len(TRAIN) + 1)
    frame = "iframe[src*='/proxy/6006/'], iframe[id^=tensorboard-frame]"
    wait(lambda: visible_in_frame(browser, frame, "scalar-card"), "TensorBoard in the notebook")
    browser.switch_to.default_content()

    browser.get(f"{running.url}/tensorboard/")
    wait(lambda: visible(browser, "scalar-card"), "a card of TensorBoard")
    wait(lambda: width(browser, "scalar-card line-chart path, scalar-card line-chart canvas") > 0, "the curve")
    wait(lambda: "loss" in text(browser, "scalar-card"), "its name")
    wait(lambda: clicked(browser, "button[aria-label='Close side pane']"), "the pane of settings, a third of the page")
    picture(browser, "tensorboard.png", tmp_path)


def test_the_gpus_are_shown(browser: webdriver.Chrome, with_gpus: Running, tmp_path: Path) -> None:
    """By a stand-in for the driver; the figures that it tells appear in the page."""
    assert "GPU 0: NVIDIA H100 80GB HBM3, 80 GiB, driver 570.86.10" in with_gpus.container.logs().decode()
    log_in(browser, with_gpus, with_gpus.token)
    wait(lambda: visible(browser, ".jp-LauncherCard"), "the launcher")
    wait(lambda: clicked(browser, "li[data-id*=nvdashboard], li[title*='GPU Dashboards']"), "the tab of the GPUs")
    wait(lambda: clicked(browser, "//button[normalize-space()='GPU Utilization']", By.XPATH), "the list of views")

    def widths() -> list[float]:
        return [bar.size["width"] for bar in browser.find_elements(By.CSS_SELECTOR, ".recharts-bar-rectangle path")]

    # Bars grow when they first appear: until they are as the driver tells it, 41 % and 87 %.
    wait(lambda: len(now := widths()) == 2 and now[0] and abs(now[1] / now[0] - 87 / 41) < 0.05, "the bars")
    picture(browser, "gpus.png", tmp_path)
