"""Programs that only maintainers of this repository run, from the root of the checkout.

`python -m tools.upstream` proposes newer releases of the frameworks; `python -m tools.facts` checks
builder/matrix/facts.yaml against the wheels; `python -m tools.packages` tries packages that people add. They import
from `builder`, and are not installed with it.
"""
