"""What engine and proxy agree on: values that both accept."""

import pytest

from mooncake_api.instance_protocol import is_origin, split_origins


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("*", ("*",)),
        ('["*"]', ("*",)),
        (
            "https://a.example, http://B.example:8080/",
            ("https://a.example", "http://b.example:8080"),
        ),
        ('["https://a.example", "http://[::1]:3000"]', ("https://a.example", "http://[::1]:3000")),
    ],
)
def test_origins_are_separated_by_commas_or_a_json_list(text, origins):
    assert split_origins(text) == origins
    assert all(map(is_origin, origins))


@pytest.mark.parametrize(
    "text",
    [
        "chat.example.com",
        "https://",
        "https://a.example/path",
        "https://a.example?x=1",
        "https://user@a.example",
        "https://a.example:port",
        "ftp://a.example",
        "null",
        "https://*.example",
        '["https://a.example"',
        "[1]",
    ],
)
def test_what_no_browser_sends_is_no_origin(text):
    assert not all(map(is_origin, split_origins(text)))
