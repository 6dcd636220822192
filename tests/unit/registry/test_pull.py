"""What is downloaded to the store."""

from __future__ import annotations

from builder.layers.oci import LAYER_TYPE, Descriptor
from builder.layers.store import Store
from builder.registry import transfer
from tests.fakes.wire import CONTENT, DIGEST, Reply, connect
from tests.unit.registry.fixtures import Lay


def test_only_what_the_store_lacks_is_downloaded_once(lay: Lay, store: Store) -> None:
    wire = lay(lambda _: Reply(body=CONTENT))
    present = store.put(b"present", LAYER_TYPE)
    missing = Descriptor(media_type=LAYER_TYPE, digest=DIGEST, size=len(CONTENT))
    assert transfer.fetch_blobs(connect(), store, [present, missing, missing]) == len(CONTENT)
    assert wire.lines == [f"GET /v2/a/b/blobs/{DIGEST}"]
    assert store.read(DIGEST) == CONTENT
