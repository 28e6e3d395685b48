"""What engine and proxy agree on: values that both accept."""

import pytest

from mooncake_api.instance_protocol import is_http_url, is_origin, split_origins


@pytest.mark.parametrize("host", ["a.example", "[::1]:80", "127.0.0.1:8000", "a" * 63])
def test_urls_of_servers(host):
    assert is_http_url(f"http://{host}")
    assert is_http_url(f"https://{host}/path")


@pytest.mark.parametrize("host", ["", ":80", "a..example", "a" * 64, "a:port", "a:0", "[::1"])
def test_hosts_that_can_not_be_looked_up_make_no_url(host):
    assert not is_http_url(f"http://{host}")


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
