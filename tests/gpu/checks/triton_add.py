"""A Triton kernel. Triton reads its source from a file; its parameters have Triton's types, not Python's."""

# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, misc, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def _add(left, right, out, count, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(left + place, mask=inside) + tl.load(right + place, mask=inside), mask=inside)


def add(left, right, out):
    """`out` = `left` + `right`, of equal shape, on one GPU; the sizes in the checks leave the last block incomplete."""
    count = out.numel()
    _add[(triton.cdiv(count, 1024),)](left, right, out, count, BLOCK=1024)
