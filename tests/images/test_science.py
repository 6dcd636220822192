"""The packages for data science: imports them and checks their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host


def test_a_regression_and_its_plot(python: Callable[[str], Any], host: Host) -> None:
    code = """
import json
import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats
from sklearn.linear_model import LinearRegression
from tqdm import tqdm
table = pd.DataFrame([dict(x=n, y=3 * n + 1) for n in tqdm(range(50), disable=True)])
fit = LinearRegression().fit(table[["x"]], table["y"])
plt.plot(table["x"], fit.predict(table[["x"]]))
plt.savefig("/tmp/line.png")
print(json.dumps([float(fit.coef_[0]), float(fit.intercept_), float(stats.pearsonr(table["x"], table["y"])[0])]))
"""
    assert python(code) == pytest.approx([3, 1, 1])
    assert host.check_output("head -c 4 /tmp/line.png | tail -c 3") == "PNG"


def test_characters_of_cjk_languages_are_drawn(python: Callable[[str], Any]) -> None:
    """They were boxes, with a warning for each."""
    code = """
import json, warnings
import matplotlib.pyplot as plt
from traitlets.config import PyFileConfigLoader
warnings.filterwarnings("error", "Glyph .* missing")
loader = PyFileConfigLoader("ipython_config.py", path="/etc/ipython")  # as IPython reads it
plt.rcParams.update(loader.load_config()["InlineBackend"]["rc"])
plt.title("损失 損失 손실 loss")
plt.savefig("/tmp/labels.png")
print(json.dumps(True))
"""
    assert python(code)
