"""Bytes, seconds and counts as text, and what is redacted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common.text import Redactor, counted, duration, one_line, parse_size, printable, secret_values, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_999, "1.0 MB"),
        (1_499_999, "1.5 MB"),
        (999_999_999, "1.0 GB"),
        (4_100_000_000, "4.1 GB"),
        (12_345_000_000_000, "12345.0 GB"),
    ],
)
def test_a_size_is_printed_in_decimal_units(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("900MB", 900_000_000),
        ("4.3GB", 4_300_000_000),
        ("0.001MB", 1000),
        ("1.001T", 1_001_000_000_000),
        ("2k", 2000),
        ("7B", 7),
        (f"{'9' * 15}B", 10**15 - 1),
    ],
)
def test_a_size_is_read_in_decimal_units(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "7", "1.5", "1.5B", ".5GB", "40 GB", "40gb", "1GiB", "٣GB", "1GB\n", f"{'9' * 16}B"]
)
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^invalid size .*: use e.g. 40GB$"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (3.24, "3.2 s"), (75.4, "75 s"), (120, "2 min 0 s"), (245.9, "4 min 5 s"), (7200, "120 min 0 s")],
)
def test_a_duration_is_printed_in_seconds_or_minutes(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_noun_is_in_the_singular_for_one() -> None:
    assert [counted(number, "image") for number in (0, 1, 2)] == ["0 images", "1 image", "2 images"]


MIRROR = "https://user:secret@mirror.example.test:8443/simple"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("GET https://mirror.example.test:8443/simple/x", "GET https://<mirror>/simple/x"),
        ("lookup mirror.example.test: no such host", "lookup <mirror>: no such host"),
        ("mirror.example.test.", "<mirror>."),
        ("to mirror.example.test", "to <mirror>"),
        ("(mirror.example.test)", "(<mirror>)"),
        ("https://user:secret@mirror.example.test/x", "https://<mirror>/x"),
        ("https://a:b@other.example.test/x", "https://other.example.test/x"),
        ("https://token@other.example.test/x", "https://other.example.test/x"),
        ("https://a:b@c@other.example.test/x", "https://other.example.test/x"),
        ("https://other.example.test/feed@view/x", "https://other.example.test/feed@view/x"),
        ("https://a:b@other.example.test/feed@view", "https://other.example.test/feed@view"),
        ("not-mirror.example.test", "not-mirror.example.test"),
        ("mirror.example.tests", "mirror.example.tests"),
        ("mail to a@b", "mail to a@b"),
        ("MIRROR.Example.test is down", "<mirror> is down"),
    ],
)
def test_hosts_and_credentials_are_hidden(text: str, redacted: str) -> None:
    assert Redactor.for_urls([MIRROR])(text) == redacted


@pytest.mark.parametrize("url", ["http://[2001:DB8::7]:8443/simple", "http://u:p@[2001:db8::7]/"])
def test_an_ipv6_address_is_hidden(url: str) -> None:
    redact = Redactor.for_urls([url])
    assert redact("http://[2001:db8::7]/x: 2001:db8::7 is down") == "http://<mirror>/x: <mirror> is down"
    assert redact("connect to 2001:db8::77 or 12001:db8::7") == "connect to 2001:db8::77 or 12001:db8::7"
    if "8443" in url:
        assert redact("http://[2001:db8::7]:8443/x") == "http://<mirror>/x"


def test_the_longer_name_is_hidden_first() -> None:
    redact = Redactor.for_urls(["http://example.test/", "http://a.example.test:80/"])
    assert redact("a.example.test:80 a.example.test example.test") == "<mirror> <mirror> <mirror>"


@pytest.mark.parametrize("url", ["http://mirror.example.test:x/", "http://mirror.example.test:99999/", "http://[::1/"])
def test_invalid_urls_are_ignored(url: str) -> None:
    redacted = Redactor.for_urls([url])(f"from {url}")
    assert redacted.startswith("from ")
    assert "mirror.example.test" not in redacted


@given(st.text(alphabet="ab /.:-_\n", max_size=30), st.text(alphabet=" /:.,\n\"'(", max_size=5))
def test_the_host_is_never_left(before: str, after: str) -> None:
    redacted = Redactor.for_urls([MIRROR])(f"{before} mirror.example.test{after}")
    assert "mirror.example.test" not in redacted


# ---- the output of programs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, é 中 🙂\n\tx\n", "plain text, é 中 🙂\n\tx\n"),
        ("\x1b[1;38;5;196mred\x1b[0m \x1b[2K\x1b[1A\x1b[?25lend", "red end"),
        ("\x9b31mred\x9b0m", "red"),
        ("\x1b]0;title\x07a\x1b]8;;https://example.test\x1b\\link\x1b]8;;\x1b\\ \x9dx\x9cb", "alink b"),
        ("\x1b]52;c;never ended", "52;c;never ended"),
        ("\x1bP1$r\x1b\\a\x1b(B\x1b7\x1bcb", "ab"),
        ("\x1b\x1b[31m[31mred", "\ufffd[31mred"),
        ("a\x08\x07\x00b\x7f", "a\ufffd\ufffd\ufffdb\ufffd"),
        ("right \u202eleft\u2028line\xa0space\r\x85", "right \ufffdleft line space  "),
    ],
)
def test_foreign_text_controls_no_terminal(text: str, expected: str) -> None:
    assert printable(text) == expected


@pytest.mark.parametrize("part", ["\x90", "\x9b", "\x1b]", "\x1b[", "\x9d0;"])
def test_long_foreign_text_takes_no_more_than_its_length(part: str) -> None:
    """A million characters took hours: each introducer was looked for an end in all that follows."""
    assert printable(part * 1_000_000).isprintable()


@given(st.text(alphabet=st.sampled_from("\x1b\x9b\x9c\x9d\x07[]0;mPab \n\\") | st.characters(), max_size=30))
def test_what_is_printable_stays_so(text: str) -> None:
    assert all(letter.isprintable() or letter in "\n\t" for letter in printable(text))
    assert printable(printable(text)) == printable(text)
    assert one_line(text).isprintable()


# ---- secrets in a command

WORDS: dict[str, tuple[str, ...]] = {  # the values that are hidden, by the words
    "srun --gpus=1 --time=30": (),
    "kubectl --token=abcdef": ("abcdef",),
    "kubectl --token abcdef run": ("abcdef",),
    "podman run -e HF_TOKEN=abcdef": ("abcdef",),
    "podman run -e TOKENIZERS_PARALLELISM=true": (),
    "skopeo --creds=me:abcdef": ("me:abcdef",),
    "run --env=NGC_API_KEY=abcdef --passphrase=abcdefg": ("abcdef", "abcdefg"),
    "srun --export=ALL,DB_PASSWORD=a-long-one": ("a-long-one",),
    "curl -H X-Api-Key:abcdef": ("abcdef",),
    "srun --author=me --container-image={image}": (),
}


@pytest.mark.parametrize(("words", "values"), WORDS.items(), ids=WORDS)
def test_secrets_in_words_are_hidden(words: str, values: tuple[str, ...]) -> None:
    environ = {"SLURM_JWT": "of the environment", "USE_AUTH": "true", "HOME": "/home/someone"}
    assert set(secret_values(words.split(), environ)) == {*values, "of the environment"}
    assert "abc" not in Redactor(secrets=values)(words)
    assert "abcdef" in secret_values(["sh", "-c", "A_TOKEN=1 B_TOKEN='abcdef' srun"], {})
    assert "abcdef" in secret_values(["-H", "Authorization: Bearer abcdef"], {})
    assert Redactor()("https://me:abc@example.test/") == "https://example.test/"
